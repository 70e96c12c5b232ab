"""Chunks of packed and padded sequences.

Where lengths may be read without a synchronisation, `chunks_by_length` groups sequences by length. A group has chunks
just large enough for its sequences, so that work and memory follow the number of tokens. Step i of its scan applies the
i-th chunks of all sequences at once. Elsewhere, all chunks have one size, their number is an upper bound, and
`ChainedChunks` scans them one after another; the first chunk of each sequence resets the state.

The tokens of these chunks are gathered from the batch, so that a layout of chunks is one row of P L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.ops._shared.chunking import Chunks, broadcastable, max_packed_chunks
from kalmix.ops._shared.scan import MapsWithReset, State, scan
from kalmix.segments import segments_without_checks


class PackedChunks(Chunks):
    """Layout of P chunks of L tokens that are gathered from a batch.

    Attributes:
        index: int64 `[P L]`, position of each token in the flattened batch `[B T]`; B T for a missing token.
        inside: bool `[P, L]`, whether there is a token; `None` if all are there.
        sequences: int64 `[n]`, the sequences whose states the chunks use; `None` for all.
    """

    def __init__(
        self, token: Tensor, inside: Tensor, total: int, key_heads: int, sequences: Tensor | None = None
    ) -> None:
        """Build a layout from the position of each token in the batch of `total` tokens, and `inside`; `[P, L]`."""
        count, size = token.shape
        super().__init__(1, count * size, token.device, key_heads, size)
        self.index = torch.where(inside, token, total).flatten()
        self.sequences = sequences
        reads_values = token.device.type == "cpu"
        self.full_positions = inside.all(0).tolist() if reads_values else [False] * size
        self.inside = None if all(self.full_positions) else inside

    def gather(self, x: Tensor) -> Tensor:
        """Convert tokens `[B T, ...]` of a batch to tokens `[1, P L, ...]` of chunks; 0 where there is no token."""
        if self.inside is None:
            return x.index_select(0, self.index)[None]
        inside = self.inside.flatten().view(-1, *(1,) * (x.ndim - 1))
        return torch.where(inside, x.index_select(0, self.index.clamp(max=len(x) - 1)), 0.0)[None]

    def take(self, states: State) -> State:
        """Return the states of the sequences of these chunks, from those of all sequences."""
        return states if self.sequences is None else tuple(x.index_select(0, self.sequences) for x in states)

    def put(self, states: State, own: State) -> State:
        """Replace the states of the sequences of these chunks, in place unless they are all sequences."""
        if self.sequences is None:
            return own
        return tuple(x.index_copy_(0, self.sequences, y) for x, y in zip(states, own, strict=True))

    def valid_at(self, position: int) -> Tensor | None:
        if self.inside is None or self.full_positions[position]:
            return None
        return broadcastable(self.inside[:, position])


class SteppedChunks(PackedChunks):
    """Chunks in order of their step: first chunks of all sequences, then second chunks, and so on.

    Sequences with most chunks come first, so that those of a step are the first ones of the step before it.

    Attributes:
        active_counts: number of chunks of each step.
    """

    def __init__(self, sequences: Tensor, start: Tensor, stop: Tensor, size: int, total: int, key_heads: int) -> None:
        """Build the layout of the sequences at positions `start` to `stop` of the flattened batch, none empty."""
        chunks, order = ((stop - start + size - 1) // size).sort(descending=True, stable=True)
        active = len(chunks) - torch.bincount(chunks).cumsum(0)[:-1]
        step = torch.arange(len(active)).repeat_interleave(active)
        member = order[torch.arange(len(step)) - (active.cumsum(0) - active)[step]]
        token = (start[member] + step * size)[:, None] + torch.arange(size)
        super().__init__(token, token < stop[member][:, None], total, key_heads, sequences[order])
        self.active_counts = active.tolist()
        self.needs_scan = len(self.active_counts) > 1

    def entry_of_single_chunks(self, states: State) -> State:
        return tuple(x[None].clone() for x in states)

    def scan(self, maps: Any, states: State, reverse: bool = False) -> tuple[State, State]:
        counts, kind = self.active_counts, type(maps)
        columns = zip(*(x[0].split(counts) for x in maps), strict=True)
        entries, parts, current = [], [], states
        for step, count, following in zip(columns, counts, [*counts[1:], 0], strict=True) if not reverse else ():
            entries.append(current)
            exits = kind(*step)(current)
            parts.append(tuple(x[following:count] for x in exits))
            current = tuple(x[:following] for x in exits)
        if reverse:
            current = tuple(x[:0] for x in states)
            for step, count in reversed(list(zip(columns, counts, strict=True))):
                entries.append(_append(current, tuple(x[len(y) : count] for x, y in zip(states, current, strict=True))))
                current = kind(*step)(entries[-1])
            entries.reverse()
        else:
            current = tuple(_concatenate(x[::-1]) for x in zip(*parts, strict=True))
        return tuple(_concatenate(x)[None] for x in zip(*entries, strict=True)), current


class ChainedChunks(PackedChunks):
    """Chunks of all sequences in one chain, without reading lengths."""

    def __init__(self, rows: Tensor, shape: tuple[int, int], span: int, size: int, key_heads: int) -> None:
        """Build the layout for the rows of `Segments` in a batch of `shape` `[B, T]`, in `span` tokens of each row."""
        (batch, length), segments = shape, segments_without_checks(rows)
        tiles = segments.tiles(batch, length, size)
        counts = (rows[:, 2] - rows[:, 1] + size - 1) // size  # chunks of each sequence
        number = max_packed_chunks(batch, span, size, segments.count)
        self.sequence, token, count, first = (x[:number] for x in tiles[:4])
        self.ends = torch.where(counts > 0, tiles.last - counts + 1, -1), tiles.last  # first, last chunk of a sequence
        position = torch.arange(size, device=rows.device)
        super().__init__(token[:, None] + position, position < count[:, None], batch * length, key_heads)
        final = (tiles.last[self.sequence] == torch.arange(self.count, device=rows.device)) & (count > 0)
        self.reset = first, final  # chunks that start from the state of their sequence, forward and in reverse
        self.needs_scan = True

    def scan(self, maps: Any, states: State, reverse: bool = False) -> tuple[State, State]:
        reset, end = broadcastable(self.reset[int(reverse)])[None], self.ends[1 - int(reverse)]
        initial = tuple(x[self.sequence][None] for x in states)
        zeros = tuple(torch.zeros_like(x[:1]) for x in states)
        entry = scan(MapsWithReset(maps, reset, initial), zeros, reverse)
        last = end.clamp(min=0)
        final = type(maps)(*(x[0, last] for x in maps))(tuple(x[0, last] for x in entry))
        nonempty = broadcastable(end >= 0)
        return entry, tuple(torch.where(nonempty, new, old) for new, old in zip(final, states, strict=True))


def chunks_by_length(rows: Tensor, batch: int, length: int, size: int, key_heads: int) -> list[SteppedChunks]:
    """Return the layouts of the groups of `group_by_length`, for the rows of `Segments` in `[B, T]` tokens."""
    row, start, stop = rows.long().unbind(1)
    first = row * length
    return [
        SteppedChunks(members, (first + start)[members], (first + stop)[members], own_size, batch * length, key_heads)
        for members, own_size in group_by_length(stop - start, size)
    ]


def group_by_length(lengths: Tensor, size: int) -> list[tuple[Tensor, int]]:
    """Group sequences, on a CPU, by the smallest of 1, 2, 4, ... up to `size` tokens that holds them.

    A group of fewer than `size` tokens joins the next one. Empty sequences are in no group.

    Returns:
        The sequences of each group, int64 `[n]`, and its number of tokens.
    """
    largest = (size - 1).bit_length()
    exponent = (lengths.clamp(min=1) - 1).double().log2().floor().add(1).clamp(0, largest).long()
    groups = []
    for i in range(largest + 1):
        members = ((exponent == i) & (lengths > 0)).nonzero()[:, 0]
        if len(members) << i < size and bool(((exponent > i) & (lengths > 0)).any()):
            exponent[members] += 1
        elif len(members):
            groups.append((members, min(1 << i, size)))
    return groups


def _append(first: State, second: State) -> State:
    """Concatenate states along dim 0."""
    return tuple(_concatenate([x, y]) for x, y in zip(first, second, strict=True))


def _concatenate(parts: Any) -> Tensor:
    """Concatenate along dim 0, without a copy if only one part has entries."""
    filled = [x for x in parts if len(x)] or list(parts[:1])
    return filled[0] if len(filled) == 1 else torch.cat(filled)
