"""Loader of batches from token shards, for any number of processes and workers, with a position to resume from."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from kalmix.errors import ArgumentError
from kalmix.training.shards.batches import Batch, make_batch
from kalmix.training.shards.mixture import Folder, equal_fractions, folder_weights, fractions
from kalmix.training.shards.reader import Shards
from kalmix.training.shards.rows import Cursor, PackedRows, Row, Rows, StreamRows, walk
from kalmix.validation import check_bool, check_choice, check_positive_int

_STATE = "state"  # key of a batch between worker and loader


@dataclass(frozen=True)
class Order:
    """Order of the rows that a loader reads. Two loaders with the same order read the same rows.

    Attributes:
        seq_len: tokens per row.
        packing: "best-fit" packs whole documents into rows, whose state is reset at each document. "stream" cuts the
            stream of all documents into windows.
        seed: seed of the order; `None` keeps the order of the source.
        split: "train" or "held_out".
        epochs: number of times to read the documents; `None` for no end. A mixture has no end.

    Raises:
        ArgumentError: a value has another type or is not accepted.

    Example:
        >>> from kalmix.training.shards import Order
        >>> Order(seq_len=2048, seed=1).packing
        'best-fit'
    """

    seq_len: int
    packing: Literal["best-fit", "stream"] = "best-fit"
    seed: int | None = 0
    split: Literal["train", "held_out"] = "train"
    epochs: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("seq_len", self.seq_len)
        check_choice("packing", self.packing, ("best-fit", "stream"))
        check_choice("split", self.split, ("train", "held_out"))
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ArgumentError("seed", got=repr(self.seed), expected="an integer or None")
        if self.epochs is not None:
            check_positive_int("epochs", self.epochs)


class TokenDataset(IterableDataset[Batch]):
    """Batches of one process, from token shards. `TokenLoader` reads it; each item is a whole batch.

    Args:
        mixture: folder of shards, or a mapping from folders to weights.
        order: order of the rows.
        batch_size: rows per batch in each process.
        rank: number of this process.
        world_size: number of processes.

    Raises:
        ArgumentError: as `TokenLoader`.
    """

    def __init__(
        self, mixture: Folder | dict[Folder, float], order: Order, *, batch_size: int, rank: int, world_size: int
    ) -> None:
        self.order, self.batch_size, self.rank, self.world_size = order, batch_size, rank, world_size
        self.shards: list[Shards] = [Shards(folder, order.split) for folder in folder_weights(mixture)]
        self.weights: list[float] = fractions(mixture)
        kind = PackedRows if order.packing == "best-fit" else StreamRows
        self.rows: list[Rows] = [kind(shards, order.seq_len, order.seed) for shards in self.shards]
        for shards, rows in zip(self.shards, self.rows, strict=True):
            if not rows.groups:
                got = f"{str(shards.folder)!r}, whose split {order.split!r} has {shards.tokens} tokens"
                raise ArgumentError("shards", got=got, expected="enough for one row of `seq_len` tokens")
        self.start: dict[str, Any] = self.first_state()

    def first_state(self) -> dict[str, Any]:
        """Return the position of the first row."""
        return {"rows": 0, "counts": [0] * len(self.rows), "cursors": [[0, 0, 0] for _ in self.rows]}

    def count_rows(self, limit: int) -> int:
        """Return the number of rows of all folders, each read once, or `limit` if there are more."""
        rows = chain.from_iterable(walk(rows, Cursor(), 1) for rows in self.rows)
        return sum(1 for _ in islice(rows, limit))

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        workers, mine = (1, 0) if worker is None else (worker.num_workers, worker.id)
        step = self.batch_size * self.world_size
        first = self.rank * self.batch_size
        rows: list[tuple[Shards, Row]] = []
        for number, (source, row, state) in enumerate(self._walk()):
            batch, place = divmod(number, step)
            if batch % workers == mine and first <= place < first + self.batch_size:
                rows.append((self.shards[source], row))
            if place == step - 1 and rows:
                yield make_batch(rows, self.order.seq_len) | {_STATE: state()}
                rows = []

    def _walk(self) -> Iterator[tuple[int, Row, Any]]:
        """Yield all rows of all processes from the start on: source, row, and a function of the position after it."""
        cursors = [Cursor(*cursor) for cursor in self.start["cursors"]]
        counts, total = list(self.start["counts"]), self.start["rows"]
        walks = [walk(rows, cursor, self.order.epochs) for rows, cursor in zip(self.rows, cursors, strict=True)]

        def state() -> dict[str, Any]:
            return {"rows": total, "counts": list(counts), "cursors": [list(cursor) for cursor in cursors]}

        while True:
            total += 1
            behind = [weight * total - count for weight, count in zip(self.weights, counts, strict=True)]
            source = behind.index(max(behind))
            found = next(walks[source], None)
            if found is None:
                return
            row, cursors[source] = found
            counts[source] += 1
            yield source, row, state


class TokenLoader(DataLoader[Batch]):
    """Endless batches of training tokens from one or several folders of shards.

    The order of all rows follows from the settings of `order` alone. Batch n of all processes together holds rows
    n * batch_size * world_size and following, so that it is the same for any number of processes with the same total,
    and for any number of workers. At the end of a run of finite `epochs`, rows that fill no batch of all processes are
    left out.

    Iterating continues after the last batch that was yielded, or from the start after the end. `state_dict` returns
    this position and `load_state_dict` restores it, also with another batch size, number of processes or workers.

    Batches are mappings for models of kalmix and transformers. With "stream": `input_ids`, `labels` and `shift_labels`,
    int64 `[batch_size, seq_len]`. With "best-fit": the same as one row `[1, batch_size * seq_len]`, with
    `position_ids` and with `cu_seq_lens_q`, int32 `[documents + 1]`. See `kalmix.training.shards.batches`.

    Args:
        shards: folder of shards, or a mapping from folders to weights. Each folder gives its weight's share of the rows
            at all times, up to one row.
        order: length of rows, packing, shuffling and split.
        batch_size: rows per batch in each process.
        rank: number of this process. Default: that of `torch.distributed`, or 0. Processes that share sequences, as in
            context or tensor parallelism, need equal ranks.
        world_size: number of processes. Default: that of `torch.distributed`, or 1.
        workers: worker processes that read ahead; 0 reads in this process.
        pin_memory: copy batches to pinned memory, for a GPU.

    Raises:
        ArgumentError: an argument has another type or value than described; a folder holds no finished shards, or too
            few tokens for a row; the folders have different tokenizers, or begin documents with different tokens; a
            mixture has finite epochs.

    Example:
        >>> from pathlib import Path
        >>> from kalmix.training.shards import Order, Preparation, TokenLoader, prepare
        >>> Path("corpus").mkdir()
        >>> for n in range(50):
        ...     _ = Path("corpus", f"{n}.txt").write_text("abc" * n + "d")
        >>> _ = prepare(Preparation("corpus", vocab_size=257, held_out=0), "shards")
        >>> loader = TokenLoader("shards", Order(seq_len=64), batch_size=2)
        >>> batches = iter(loader)
        >>> next(batches)["input_ids"].shape
        torch.Size([1, 128])
        >>> position, second = loader.state_dict(), next(batches)
        >>> loader.load_state_dict(position)
        >>> torch.equal(next(iter(loader))["input_ids"], second["input_ids"])
        True
    """

    dataset: TokenDataset  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        shards: Folder | dict[Folder, float],
        order: Order,
        *,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if not isinstance(order, Order):
            raise ArgumentError("order", got=f"a {type(order).__name__}", expected="an Order")
        check_positive_int("batch_size", batch_size)
        check_bool("pin_memory", pin_memory)
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
            raise ArgumentError("workers", got=repr(workers), expected="an integer of at least 0")
        rank, world_size = _processes(rank, world_size)
        if order.epochs is not None and len(folder_weights(shards)) > 1:
            raise ArgumentError("epochs", got=order.epochs, expected="None for a mixture, which has no end")
        dataset = TokenDataset(shards, order, batch_size=batch_size, rank=rank, world_size=world_size)
        tokenizers = {shards.manifest.tokenizer_sha256 for shards in dataset.shards}
        if len(tokenizers) > 1:
            problem = f"have {len(tokenizers)} different tokenizers"
            raise ArgumentError("shards", problem=problem, expected="shards of one tokenizer")
        begins = {shards.manifest.bos_id for shards in dataset.shards}
        if len(begins) > 1:
            problem = f"begin documents with {len(begins)} different tokens"
            raise ArgumentError("shards", problem=problem, expected="shards of one `bos` (`--bos`)")
        options: dict[str, Any] = {"num_workers": workers, "pin_memory": pin_memory}
        if workers:
            options["worker_init_fn"] = _outlive_one_signal
        own = torch.Generator()  # so that an iterator draws its seed, which is unused, from no other generator
        super().__init__(dataset, batch_size=None, generator=own, **options)

    def __iter__(self) -> Iterator[Batch]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for batch in super().__iter__():
            self.dataset.start = batch.pop(_STATE)
            yield batch
        self.dataset.start = self.dataset.first_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded, and what it depends on, for JSON."""
        return {**self.dataset.start, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position. An iterator that exists already does not change.

        Args:
            state: position that `state_dict` returned.

        Raises:
            ArgumentError: `state` is no position, or belongs to other shards, weights or another order.
        """
        try:
            order, saved = self._order(), state["order"]
            changed = [name for name, value in order.items() if saved[name] != value]
            if "weights" in changed and equal_fractions(saved["weights"], order["weights"]):
                changed.remove("weights")
            position = {name: state[name] for name in self.dataset.first_state()}
            cursors = [Cursor(*map(int, cursor)) for cursor in position["cursors"]]
            wrong = len(cursors) != len(self.dataset.rows) or len(position["counts"]) != len(cursors)
            if wrong or any(c.group >= rows.groups for c, rows in zip(cursors, self.dataset.rows, strict=True)):
                raise ValueError("it does not fit the shards")
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError("state", problem=f"is damaged ({error!r})", expected="a `state_dict()`") from None
        if changed:
            problem = f"belongs to another {' and '.join(changed)}"
            raise ArgumentError("state", problem=problem, expected="the position of a loader with these settings")
        self.dataset.start = position

    def _order(self) -> dict[str, Any]:
        """Return all that the order of rows depends on. The paths of the shards do not matter, their contents do."""
        dataset, order = self.dataset, self.dataset.order
        hashes = [[x.sha256 for x in shards.manifest.shards if x.split == order.split] for shards in dataset.shards]
        names = ("seq_len", "packing", "seed", "split")
        settings = {name: getattr(order, name) for name in names}
        return {**settings, "weights": dataset.weights, "shards": [_digest(each) for each in hashes]}


def _outlive_one_signal(worker: int) -> None:
    """Let a worker outlive the first SIGTERM that is not from its training process, on systems that tell who sent it.

    torchrun and schedulers send it to all processes of a run. The training process then still needs batches, to end the
    step and save a checkpoint. Python sends it to workers that still run when the training process ends.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_wait_for_signals, args=(os.getppid(),), daemon=True).start()


def _wait_for_signals(training_process: int) -> None:
    """End this process at the first SIGTERM of the training process, or at the second one of others."""
    senders = (signal.sigwaitinfo([signal.SIGTERM]).si_pid for _ in range(2))
    if training_process in senders:  # stops at the first
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _digest(hashes: list[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _processes(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the number of this process and of all, from `torch.distributed` if they are not given."""
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    if world_size is None:
        world_size = torch.distributed.get_world_size() if started else 1
    if rank is None:
        rank = torch.distributed.get_rank() if started else 0
    check_positive_int("world_size", world_size)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world_size:
        raise ArgumentError("rank", got=repr(rank), expected=f"an integer from 0 to {world_size - 1}")
    return rank, world_size
