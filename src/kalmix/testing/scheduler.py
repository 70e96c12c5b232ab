"""Small scheduler of a server, to test steps: continuous batching over a pool of slots.

`check_steps` decodes sequences of different lengths. They join and leave the batch at any token, and slots are used
again. Some share a prefix and continue from the state after it; some tokens are wrong drafts, which are rejected.
Free slots and the signals of padding rows contain NaN.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.ops._shared.step import NO_SEQUENCE, Slots, check_slots, store
from kalmix.testing.cases import parts
from kalmix.testing.tolerances import relative_error
from kalmix.types import Filtered, replace_fields

Step = Callable[..., Filtered]  # (signals, pool, slots, out=...)
Alone = Callable[[Any, Any], Filtered]  # (signals of one sequence, its prior)
GARBAGE = 123456789  # integers of free slots


class Workload(NamedTuple):
    """Sequences to decode.

    Attributes:
        signals: signals of R sequences of at most T tokens, `[R, T, ...]`.
        prior: beliefs before the first token, R sequences.
        invariant: names of signals without a token axis.
        lengths: number of tokens of each sequence.
        parents: sequence whose first tokens are the same; `None` for most.
        shared: number of these tokens.
    """

    signals: Any
    prior: Any
    invariant: tuple[str, ...]
    lengths: list[int]
    parents: list[int | None]
    shared: list[int]

    def tokens(self, rows: list[int], times: list[int]) -> Any:
        """Return the signals of one token for each row, `[B, 1, ...]`; NaN in rows whose sequence is negative."""
        index, time = (torch.tensor(x, device=self.signals.v.device) for x in (rows, times))

        def take(x: Tensor) -> Tensor:
            chosen = x[index.clamp(min=0), time][:, None]
            return torch.where((index < 0).view(-1, *[1] * (x.ndim - 1)), torch.nan, chosen)

        return self._map_tokens(take)

    def sequence(self, row: int) -> tuple[Any, Any]:
        """Return the signals `[1, length, ...]` and the prior of one sequence."""
        prior = self.prior.take(torch.tensor([row], device=self.signals.v.device))
        return self._map_tokens(lambda x: x[row : row + 1, : self.lengths[row]]), prior

    def _map_tokens(self, function: Callable[[Tensor], Tensor]) -> Any:
        fields = self.signals._asdict().items()
        changed = {k: function(x) for k, x in fields if isinstance(x, Tensor) and k not in self.invariant}
        return replace_fields(self.signals, **changed)


def make_workload(signals: Any, prior: Any, invariant: tuple[str, ...] = (), seed: int = 0) -> Workload:
    """Draw the lengths of sequences, and the prefixes that every second one shares with an earlier one.

    Args:
        signals: signals of R sequences of T tokens, a `NamedTuple` of tensors `[R, T, ...]`.
        prior: beliefs of the sequences before their first token.
        invariant: names of signals without a token axis.
        seed: seed of the draws.
    """
    draw, (count, length) = random.Random(seed), signals.v.shape[:2]
    lengths = [draw.randint(length // 2, length) for _ in range(count)]
    parents: list[int | None] = [draw.randrange(0, row, 2) if row % 2 else None for row in range(count)]
    shared = [0 if p is None else draw.randint(1, min(lengths[p], lengths[row])) for row, p in enumerate(parents)]
    signals = type(signals)(*(x.clone() if isinstance(x, Tensor) else x for x in signals))
    prior = type(prior)(*(x.clone() for x in prior))
    for row, parent in enumerate(parents):
        if parent is None:
            continue
        for x in prior:
            x[row] = x[parent]
        for name, x in signals._asdict().items():
            if isinstance(x, Tensor) and name not in invariant:
                x[row, : shared[row]] = x[parent, : shared[row]]
    return Workload(signals, prior, invariant, lengths, parents, shared)


@dataclass
class Stream:
    """Sequence that a server decodes.

    Attributes:
        row: its index in the workload.
        slot: slot of the state after the accepted tokens; sequences with a common prefix may share it.
        readouts: read-outs of the accepted tokens.
        draft: slot of the state after wrong draft tokens; `None` if there are none.
        final: state after the last token; `None` before it.
    """

    row: int
    slot: int
    readouts: list[list[Tensor]] = field(default_factory=list)
    draft: int | None = None
    final: Any = None


class Turn(NamedTuple):
    """Row of a batch: one token of a sequence, or padding if `stream` is `None`."""

    stream: Stream | None
    source: int  # sequence and index of the token: another one for a wrong draft
    time: int
    read: int
    write: int
    wrong: bool


PADDING = Turn(None, NO_SEQUENCE, 0, NO_SEQUENCE, NO_SEQUENCE, False)


class Server:
    """Server that decodes a workload with a pool of slots.

    Args:
        workload: sequences to decode.
        pool: pool of more than `rows` slots; filled with NaN, then updated in place.
        rows: rows of a batch.
        seed: seed of the schedule.

    Raises:
        ArgumentError: the pool has too few slots.
    """

    def __init__(self, workload: Workload, pool: Any, rows: int, seed: int = 0) -> None:
        if (count := pool[0].shape[0]) <= rows:
            raise ArgumentError("pool", problem=f"has {count} slots", expected=f"more than {rows}, the rows of a batch")
        self.workload: Workload = workload
        self.pool: Any = pool
        self.rows: int = rows
        self.draw: random.Random = random.Random(seed)
        self.free: list[int] = list(range(count))
        self.users: Counter[int] = Counter()  # number of sequences that share a slot
        self.waiting: list[int] = [row for row, parent in enumerate(workload.parents) if parent is None]
        self.active: list[Stream] = []
        self.finished: dict[int, Stream] = {}
        for slot in self.free:
            fill_slot(pool, slot)

    def run(self, step: Step) -> list[Stream]:
        """Decode all sequences and return them in the order of the workload."""
        out: Filtered | None = None
        while len(self.finished) < len(self.workload.lengths):
            while self.waiting and len(self.free) > self.rows:
                self._start(Stream(self.waiting.pop(0), self._take_slot()))
            turns = self._plan()
            rows, times, reads, writes = (list(x) for x in zip(*(turn[1:5] for turn in turns), strict=True))
            slots = Slots(*(torch.tensor(x, dtype=torch.int32, device=self.pool[0].device) for x in (reads, writes)))
            check_slots(slots, self.pool[0].shape[0])
            before = [x.clone() for x in self.pool]
            out = step(self.workload.tokens(rows, times), self.pool, slots, out=out)
            self._check_other_slots(before, writes)
            for row, turn in enumerate(turns):
                self._finish(turn, [x[row].clone() for x in out[:2] if x is not None])
        return [self.finished[row] for row in sorted(self.finished)]

    def _start(self, stream: Stream) -> None:
        """Load the prior of a sequence into its slot."""
        store(self.pool, torch.tensor([stream.slot], device=self.pool[0].device), self.workload.sequence(stream.row)[1])
        self.active.append(stream)

    def _plan(self) -> list[Turn]:
        """Choose the tokens of a batch, in random rows."""
        chosen = self.draw.sample(self.active, self.draw.randint(1, min(len(self.active), self.rows)))
        turns = [turn for stream in chosen if (turn := self._turn(stream)) is not None]
        if not turns and not self.free:
            raise RuntimeError("the pool has too few slots for this workload")
        return self.draw.sample([*turns, *[PADDING] * (self.rows - len(turns))], self.rows)

    def _turn(self, stream: Stream) -> Turn | None:
        """Choose the next token of a sequence: its own one or a wrong draft, in place or to another slot."""
        if stream.draft is not None and self.draw.random() < 0.5:  # reject the draft
            self._release(stream.draft)
            stream.draft = None
        wrong = stream.draft is not None or self.draw.random() < 0.3
        read = stream.slot if stream.draft is None else stream.draft
        source, time, write = stream.row, len(stream.readouts), read
        if wrong:
            source = self.draw.randrange(len(self.workload.lengths))
            time = self.draw.randrange(self.workload.lengths[source])
        if stream.draft is None and (wrong or self.users[read] > 1 or self.draw.random() < 0.2):
            if wrong and self.draw.random() < 0.3:
                write = NO_SEQUENCE
            elif self.free:
                write = self._take_slot()
            else:
                return None
        return Turn(stream, source, time, read, write, wrong)

    def _finish(self, turn: Turn, readout: list[Tensor]) -> None:
        """Record the read-out of a row; start sequences with this prefix, and free slots."""
        stream = turn.stream
        if stream is None:
            assert not any(x.any() for x in readout), "the read-out of a row of padding is not 0"
            return
        if turn.wrong:
            stream.draft = None if turn.write == NO_SEQUENCE else turn.write
            return
        if turn.write != turn.read:
            self._release(turn.read)
            stream.slot = turn.write
        stream.readouts.append(readout)
        for row, parent in enumerate(self.workload.parents):
            if parent == stream.row and self.workload.shared[row] == len(stream.readouts):
                self.users[stream.slot] += 1
                self.active.append(Stream(row, stream.slot, list(stream.readouts)))
                self._retire(self.active[-1])
        self._retire(stream)

    def _retire(self, stream: Stream) -> None:
        """Free the slot of a sequence after its last token."""
        if len(stream.readouts) == self.workload.lengths[stream.row]:
            stream.final = type(self.pool)(*(x[stream.slot : stream.slot + 1].clone() for x in self.pool))
            self.active.remove(stream)
            self.finished[stream.row] = stream
            self._release(stream.slot)

    def _take_slot(self) -> int:
        slot = self.free.pop(self.draw.randrange(len(self.free)))
        self.users[slot] = 1
        return slot

    def _release(self, slot: int) -> None:
        self.users[slot] -= 1
        if not self.users[slot]:
            self.free.append(slot)
            fill_slot(self.pool, slot)

    def _check_other_slots(self, before: list[Tensor], writes: list[int]) -> None:
        """Check that a step changed the slots that it writes alone."""
        others = [slot for slot in range(before[0].shape[0]) if slot not in writes]
        for old, new in zip(before, self.pool, strict=True):
            torch.testing.assert_close(new[others], old[others], rtol=0, atol=0, equal_nan=True)


def fill_slot(pool: Any, slot: int) -> None:
    """Fill a slot with NaN, and with large numbers where it stores integers."""
    for x in pool:
        x[slot] = torch.nan if x.is_floating_point() else GARBAGE


def check_steps(
    step: Step,
    alone: Alone,
    workload: Workload,
    tolerances: list[float],
    *,
    rows: int = 4,
    pool: Any = None,
    same_bits: bool = True,
) -> None:
    """Check that a server's steps agree with filtering each sequence alone.

    Read-outs and final states are compared with `alone` up to a tolerance, and bit by bit with steps of the same kernel
    in a batch of one row.

    Args:
        step: step `(signals, pool, slots, out=...)`.
        alone: function of the signals and the prior of one sequence that filters it in float64.
        workload: sequences to decode.
        tolerances: largest relative error of the mean, the variance if there is one, and each tensor of the belief.
        rows: rows of a batch.
        pool: pool of more slots than rows. Default: three slots per row.
        same_bits: whether the bits of a sequence must not depend on its batch.
    """
    if pool is None:
        pool = workload.prior.take(torch.zeros(3 * rows, dtype=torch.int64, device=workload.signals.v.device))
    results: list[list[Tensor]] = []
    for stream in Server(workload, pool, rows).run(step):
        got = [*(torch.cat(x) for x in zip(*stream.readouts, strict=True)), *stream.final]
        if same_bits:
            again = _decode_alone(step, workload, stream.row, pool)
            assert all(map(torch.equal, got, again)), f"the bits of sequence {stream.row} depend on its batch"
        got[-len(pool) :] = parts(stream.final)
        mean, variance, belief = alone(*workload.sequence(stream.row))
        expected = [mean[0], *([] if variance is None else [variance[0]]), *parts(belief)]
        pairs = zip(got, expected, strict=True)
        results.append([torch.stack([x.double().flatten(), y.double().flatten()]) for x, y in pairs])
    errors = [relative_error(*torch.cat(x, 1)) for x in zip(*results, strict=True)]
    assert all(error <= bound for error, bound in zip(errors, tolerances, strict=True)), (errors, tolerances)


def _decode_alone(step: Step, workload: Workload, row: int, pool: Any) -> list[Tensor]:
    """Return the read-outs and the final state of one sequence, decoded in a batch of one row."""
    device = workload.signals.v.device
    single = type(pool)(*(x[:1].clone() for x in pool))
    fill_slot(single, 0)
    store(single, torch.zeros(1, dtype=torch.int64, device=device), workload.sequence(row)[1])
    slots, readouts = Slots(*torch.zeros(2, 1, dtype=torch.int32, device=device)), []
    for time in range(workload.lengths[row]):
        result = step(workload.tokens([row], [time]), single, slots, out=None)
        readouts.append([x[0] for x in result[:2] if x is not None])
    return [*(torch.cat(x) for x in zip(*readouts, strict=True)), *single]
