"""Sequences cut into chunks of equal size, packed runs or whole batch rows, and states carried from chunk to chunk.

`Chunks.of` takes the geometry of a call; `cut` and `paste` lay tokens out by chunks and back; `scan` carries states
through maps of chunks, forwards or backwards. A lane is what chunks follow one another in: a batch row or, for packed
runs, all runs end to end, where the first chunk of a run starts from a state of its own. Where looking at values would
wait for a GPU, or break a graph, as many chunks are taken as the runs could need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.ops._shared.scan import Links, State, scan
from kalmix.segments import Segments, segments_without_checks


class Chunks:
    """Batch rows as lanes of P chunks of L tokens; value heads stand beside the key head they read, `[H, G / H]`."""

    @staticmethod
    def of(v: Tensor, key_heads: int, rows: Tensor | None, size: int) -> Chunks:
        """Chunks of at most `size` tokens for values `[B, T, G, V]` and the rows of `Segments`, if there are any.

        L is `size`, or the least power of two that holds all T tokens.
        """
        size = min(size, 1 << (v.shape[1] - 1).bit_length())
        return Chunks(v, key_heads, size) if rows is None else _Runs(v, key_heads, size, segments_without_checks(rows))

    def __init__(self, v: Tensor, key_heads: int, size: int) -> None:
        self.batch, self.length, self.device = *v.shape[:2], v.device
        self.key_heads, self.size = key_heads, size
        self.lanes, self.count = self.batch, -(-self.length // size)
        self.linked = self.count > 1  # whether states pass from chunk to chunk

    def cut(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[B, T, H or G, *]` to `[lanes, P, H, 1 or G / H, L, *]`, zero where there is no token."""
        x, missing = x.to(dtype), -self.length % self.size
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return self._chunked(x.unflatten(1, (-1, self.size)))

    def paste(self, x: Tensor) -> Tensor:
        """`[lanes, P, H, G / H, L, *]` to `[B, T, G, *]`, zero where no sequence is."""
        return self._tokens(x).flatten(1, 2)[:, : self.length]

    def cut_decay(self, log_decay: Tensor | None, like: Tensor) -> Tensor:
        """As `cut`, `[B, T, G]` or `[B, T, G, K]` to a last axis of 1 or K; none at all is 0 for all heads at once."""
        if log_decay is None:
            return like.new_zeros(()).expand(self.lanes, self.count, 1, 1, self.size, 1)
        return self.cut(log_decay if log_decay.ndim == 4 else log_decay[..., None], like.dtype)

    def here(self, position: int) -> Tensor | None:
        """Which chunks have a token at `position`, `[P, 1, 1, 1, 1]`; `None` for all."""
        if (self.count - 1) * self.size + position < self.length:
            return None
        return _column(torch.arange(self.count, device=self.device) < self.count - 1)

    def states(self, x: Tensor) -> Tensor:
        """States `[N, G, *]`, one a sequence, as `[N, H, G / H, *]`."""
        return x.unflatten(1, (self.key_heads, -1))

    def scan(self, maps: Any, states: State, backwards: bool = False) -> tuple[State, State]:
        """What arrives at each chunk from the one before it (backwards, after it), and what is left in the end.

        Args:
            maps: of each chunk, tensors `[lanes, P, H, G / H, ...]`: see `scan`. The last of them are what it makes of
                a state of zeros.
            states: `[N, H, G / H, ...]`, what every sequence starts (backwards, ends) with.

        Returns:
            States `[lanes, P, H, G / H, ...]` that arrive, and `[N, H, G / H, ...]` that every sequence ends with.
        """
        arriving = scan(Links(maps), states, backwards)
        end = 0 if backwards else -1
        return arriving, type(maps)(*(x[:, end] for x in maps))(tuple(x[:, end] for x in arriving))

    def _chunked(self, x: Tensor) -> Tensor:
        return x.unflatten(3, (self.key_heads, -1)).movedim(2, 4).contiguous()

    def _tokens(self, x: Tensor) -> Tensor:
        return x.movedim(4, 2).flatten(3, 4)


class _Runs(Chunks):
    """The chunks of all runs as one lane."""

    def __init__(self, v: Tensor, key_heads: int, size: int, segments: Segments) -> None:
        super().__init__(v, key_heads, size)
        tiles = segments.tiles(self.batch, self.length, size)
        pieces = (segments.rows[:, 2] - segments.rows[:, 1] + size - 1) // size
        self.lanes, self.count, self.linked = 1, tiles.token.shape[0], True
        if v.device.type == "cpu" and not torch.compiler.is_compiling():  # else as many as there could be
            self.count = max(1, int(pieces.sum()))
        self.sequence, token, count, first = (x[: self.count] for x in tiles[:4])
        self.ends = torch.where(pieces > 0, tiles.last - pieces + 1, -1), tiles.last  # of runs, their first and last
        final = (tiles.last[self.sequence] == torch.arange(self.count, device=v.device)) & (count > 0)
        self.anew = first, final  # which chunks start from a state of their own
        position = torch.arange(size, device=v.device)
        self.inside = position < count[:, None]
        self.index = token[:, None] + position  # of tokens `[P, L]`, in the flattened batch

    def cut(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.flatten(0, 1)[torch.where(self.inside, self.index, 0)].to(dtype)
        return self._chunked(torch.where(self.inside[..., None, None], x, 0.0)[None])

    def here(self, position: int) -> Tensor | None:
        return _column(self.inside[:, position])

    def paste(self, x: Tensor) -> Tensor:
        x, total = self._tokens(x)[0].flatten(0, 1), self.batch * self.length
        flat = x.new_zeros(total + 1, *x.shape[1:])  # what belongs nowhere goes to the extra row
        flat = flat.index_copy(0, torch.where(self.inside, self.index, total).flatten(), x)
        return flat[:total].unflatten(0, (self.batch, self.length))

    def scan(self, maps: Any, states: State, backwards: bool = False) -> tuple[State, State]:
        anew, end = _column(self.anew[int(backwards)])[None], self.ends[1 - int(backwards)]
        fresh = tuple(x[self.sequence][None] for x in states)
        before = tuple(torch.zeros_like(x[:1]) for x in states)
        arriving = scan(Links(maps, anew, fresh), before, backwards)
        last = end.clamp(min=0)
        left = type(maps)(*(x[0, last] for x in maps))(tuple(x[0, last] for x in arriving))
        after = tuple(torch.where(_column(end >= 0), new, old) for new, old in zip(left, states, strict=True))
        return arriving, after


def _column(flag: Tensor) -> Tensor:
    """Flags `[P]` to be broadcast along `[P, H, G / H, *, *]`."""
    return flag.view(-1, *(1,) * 4)
