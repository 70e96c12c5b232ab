"""Division of sequences into chunks of equal size, and scans of states over the chunks.

`Chunks.create` computes the layout for a call; `split` and `merge` convert tensors of tokens to chunks and back; `scan`
passes states from chunk to chunk, forward or in reverse. A chain is a series of consecutive chunks that one scan runs
through: a batch row or, for packed sequences, all sequences one after another, where the first chunk of each sequence
resets the state. On a GPU, where values must not be read on the host, packed sequences take the largest number of
chunks that they could need. Chunks run inside custom ops, which `torch.compile` does not trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.ops._shared.scan import MapsWithReset, State, scan
from kalmix.segments import Segments, segments_without_checks


class Chunks:
    """Layout of tokens in chunks: each batch row is a chain of P chunks of L tokens.

    In chunks, value heads have two axes: `[H, G / H]`, where H is the key head that they use.
    """

    @staticmethod
    def create(v: Tensor, key_heads: int, rows: Tensor | None, size: int) -> Chunks:
        """Return the layout for values `[B, T, G, V]` and the rows of `Segments` or `None`.

        L is `size`, a power of two, or the smallest power of two that holds all T tokens.
        """
        size = min(size, 1 << (v.shape[1] - 1).bit_length())
        return (
            Chunks(v, key_heads, size)
            if rows is None
            else _PackedChunks(v, key_heads, size, segments_without_checks(rows))
        )

    def __init__(self, v: Tensor, key_heads: int, size: int) -> None:
        self.batch, self.length, self.device = *v.shape[:2], v.device
        self.key_heads, self.size = key_heads, size
        self.chains, self.count = self.batch, -(-self.length // size)
        self.needs_scan = self.count > 1

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert `[B, T, H or G, *]` to `[chains, P, H, 1 or G / H, L, *]`, with zeros where there is no token."""
        x, missing = x.to(dtype), -self.length % self.size
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return self._split_heads(x.unflatten(1, (-1, self.size)))

    def merge(self, x: Tensor) -> Tensor:
        """Convert `[chains, P, H, G / H, L, *]` to `[B, T, G, *]`, with zeros at tokens outside every sequence."""
        return self._merge_heads(x).flatten(1, 2)[:, : self.length]

    def split_decay(self, log_decay: Tensor | None, like: Tensor) -> Tensor:
        """Convert log-decays like `split`, with a last axis of size 1 (per head) or K (per key); zeros for `None`."""
        if log_decay is None:
            return like.new_zeros(()).expand(self.chains, self.count, 1, 1, self.size, 1)
        return self.split(log_decay if log_decay.ndim == 4 else log_decay[..., None], like.dtype)

    def valid_at(self, position: int) -> Tensor | None:
        """Return which chunks have a token at `position`, `[P, 1, 1, 1, 1]`; `None` if all have one."""
        if (self.count - 1) * self.size + position < self.length:
            return None
        return _broadcastable(torch.arange(self.count, device=self.device) < self.count - 1)

    def group_heads(self, x: Tensor) -> Tensor:
        """Convert states `[N, G, *]`, one per sequence, to `[N, H, G / H, *]`."""
        return x.unflatten(1, (self.key_heads, -1))

    def scan(self, maps: Any, states: State, reverse: bool = False) -> tuple[State, State]:
        """Pass states through the maps of consecutive chunks.

        Args:
            maps: named tuple of tensors `[chains, P, H, G / H, ...]`, the map of each chunk: see `scan`. Its last
                tensors are the images of zero states.
            states: `[N, H, G / H, ...]`, the initial state of every sequence (if `reverse`, the state after it).
            reverse: whether to apply the maps from the last chunk to the first.

        Returns:
            The states `[chains, P, H, G / H, ...]` that each chunk's map is applied to, and the final states
            `[N, H, G / H, ...]` of the sequences.
        """
        entry = scan(MapsWithReset(maps), states, reverse)
        end = 0 if reverse else -1
        return entry, type(maps)(*(x[:, end] for x in maps))(tuple(x[:, end] for x in entry))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(3, (self.key_heads, -1)).movedim(2, 4).contiguous()

    def _merge_heads(self, x: Tensor) -> Tensor:
        return x.movedim(4, 2).flatten(3, 4)


class _PackedChunks(Chunks):
    """Layout of packed sequences: the chunks of all sequences form one chain."""

    def __init__(self, v: Tensor, key_heads: int, size: int, segments: Segments) -> None:
        super().__init__(v, key_heads, size)
        tiles = segments.tiles(self.batch, self.length, size)
        counts = (segments.rows[:, 2] - segments.rows[:, 1] + size - 1) // size  # chunks of each sequence
        self.chains, self.needs_scan = 1, True
        if v.device.type == "cpu":
            self.count = max(1, int(counts.sum()))
        else:  # an upper bound, without a sync
            self.count = max_packed_chunks(self.batch, self.length, size, segments.count)
        self.sequence, token, count, first = (x[: self.count] for x in tiles[:4])
        self.ends = torch.where(counts > 0, tiles.last - counts + 1, -1), tiles.last  # first, last chunk of a sequence
        final = (tiles.last[self.sequence] == torch.arange(self.count, device=v.device)) & (count > 0)
        self.reset = first, final  # chunks that start from the state of their sequence, forward and in reverse
        position = torch.arange(size, device=v.device)
        self.inside = position < count[:, None]
        self.index = token[:, None] + position  # index `[P, L]` of each token in the flattened batch

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.flatten(0, 1)[torch.where(self.inside, self.index, 0)].to(dtype)
        return self._split_heads(torch.where(self.inside[..., None, None], x, 0.0)[None])

    def valid_at(self, position: int) -> Tensor | None:
        return _broadcastable(self.inside[:, position])

    def merge(self, x: Tensor) -> Tensor:
        x, total = self._merge_heads(x)[0].flatten(0, 1), self.batch * self.length
        flat = x.new_zeros(total + 1, *x.shape[1:])  # the extra row takes the values of no token
        flat = flat.index_copy(0, torch.where(self.inside, self.index, total).flatten(), x)
        return flat[:total].unflatten(0, (self.batch, self.length))

    def scan(self, maps: Any, states: State, reverse: bool = False) -> tuple[State, State]:
        reset, end = _broadcastable(self.reset[int(reverse)])[None], self.ends[1 - int(reverse)]
        initial = tuple(x[self.sequence][None] for x in states)
        zeros = tuple(torch.zeros_like(x[:1]) for x in states)
        entry = scan(MapsWithReset(maps, reset, initial), zeros, reverse)
        last = end.clamp(min=0)
        final = type(maps)(*(x[0, last] for x in maps))(tuple(x[0, last] for x in entry))
        nonempty = _broadcastable(end >= 0)
        return entry, tuple(torch.where(nonempty, new, old) for new, old in zip(final, states, strict=True))


def max_packed_chunks(batch: int, length: int, size: int, sequences: int) -> int:
    """Return the largest number of chunks of `size` tokens that packed sequences in `[B, T]` tokens can have."""
    return batch * ((length - 1) // size) + sequences


def _broadcastable(flag: Tensor) -> Tensor:
    """Reshape flags `[P]` to `[P, 1, 1, 1, 1]`."""
    return flag.view(-1, *(1,) * 4)
