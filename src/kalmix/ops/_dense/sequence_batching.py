"""Sequences as lanes of tiles that advance together, the longest first, so that those under way are always the first.

Packed, padded and whole sequences differ in nothing but where the tokens of a tile lie. No step is spent on a sequence
that has ended, as far as that can be known without waiting for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.segments import Segments

TILE = 16  # tokens that share a factorisation, half as many where keys are narrower than `WIDE`
# Tokens of a tile that see few directions have a nearly singular covariance: its condition is about L p / r^2, for
# variances p of the prior and r^2 of the noise. Float32 factors it as well as it stores the belief if L <= 2 K / 3.
WIDE = 3 * TILE // 2
NARROW = TILE  # keys narrower than this are filtered in float64, which costs them little
STEPS = 8  # tiles of a lane that are prepared at once; of wide keys, only the belief before them is kept
ROOM = 1 << 24  # numbers in the largest array of what is prepared


class Places:
    """Where the tokens of R / G tiles lie, which all heads share.

    Attributes:
        token: `[R / G, L]`, in the flattened batch; B T where there is none.
        here: `[R / G, L]`, whether there is one; `None` if everywhere.
    """

    def __init__(self, token: Tensor, here: Tensor | None) -> None:
        self.token, self.here = token, here
        self._rows: dict[tuple[int, int], Tensor] = {}

    def rows(self, heads: int, repeats: int = 1) -> Tensor:
        """Where these tokens lie in `[B * T * heads, *]`, one after another; at its end or behind for none."""
        if (heads, repeats) not in self._rows:
            head = torch.arange(heads, device=self.token.device).repeat_interleave(repeats)
            self._rows[heads, repeats] = (self.token[:, None] * heads + head[:, None]).flatten()
        return self._rows[heads, repeats]


class Lanes:
    """N sequences of `[B, T]` tokens, for beliefs `[N, G, K, V]`; step j takes the j-th tile of `counts[j]` lanes.

    Tiles, and the beliefs before them, are of one head each: R are those of R / G stretches of time.
    """

    def __init__(self, v: Tensor, mean: Tensor, rows: Tensor | None) -> None:
        self.tokens, self.heads, self.dtype = v.shape[:2], v.shape[2], working_dtype(mean)
        self.size, self.together, self.every = _tile(v, mean), _together(v, mean), _every(v, mean)
        self.whole = rows is None
        runs = Segments.whole(v.shape[0], v.shape[1], v.device).rows if rows is None else rows
        row, start, stop = runs.long().unbind(1)
        tiles = (stop - start + self.size - 1) // self.size
        self.order = tiles.argsort(descending=True, stable=True)
        begin = row * self.tokens[1]
        self.begin, self.end = (begin + start)[self.order], (begin + stop)[self.order]
        self.counts = [_under_way(j, v, mean, rows) for j in range(-(-self.tokens[1] // self.size))]
        if rows is not None and v.device.type == "cpu":  # look
            counts = (tiles > torch.arange(len(self.counts))[:, None]).sum(1)
            self.counts = [count for count in counts.tolist() if count]

    @staticmethod
    def kept(v: Tensor, mean: Tensor, rows: Tensor | None) -> int:
        """How many beliefs there are before tiles that one is kept before, at most."""
        steps, every = -(-v.shape[1] // _tile(v, mean)), _every(v, mean)
        return mean.shape[1] * sum(_under_way(j, v, mean, rows) for j in range(0, steps, every))

    def blocks(self) -> list[range]:
        """All steps, a few at a time."""
        count = len(self.counts)
        return [range(j, min(j + self.together, count)) for j in range(0, count, self.together)]

    def sort(self, states: Tensor) -> Tensor:
        """States `[N, G, ...]` as `[N * G, ...]`, in the order of the lanes."""
        return states.index_select(0, self.order).flatten(0, 1).to(self.dtype)

    def unsort(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        states = states.unflatten(0, (-1, self.heads)).to(dtype)
        return torch.empty_like(states).index_copy_(0, self.order, states)

    def places(self, block: range) -> Places:
        """Where the tokens of a block's tiles lie."""
        within = torch.arange(self.size, device=self.begin.device)
        token = torch.cat([self.begin[: self.counts[j], None] + j * self.size + within for j in block])
        end = torch.cat([self.end[: self.counts[j], None] for j in block])
        here = token < end
        everywhere = here.device.type == "cpu" and bool(here.all())  # look
        return Places(torch.where(here, token, self.tokens.numel()), None if everywhere else here)

    def cut(self, places: Places, x: Tensor, absent: float = 0.0) -> Tensor:
        """`[B, T, H or G, *]` to `[R, L, *]`."""
        index, rows = places.rows(x.shape[2], self.heads // x.shape[2]), x.flatten(0, 2)
        index = index if places.here is None else index.clamp(max=len(rows) - 1)
        x = rows.index_select(0, index).to(self.dtype).unflatten(0, (-1, self.size))
        if places.here is None:
            return x
        here = places.here.repeat_interleave(self.heads, 0)
        return torch.where(here.view(*here.shape, *(1,) * (x.ndim - 2)), x, absent)

    def blank(self, like: Tensor) -> Tensor:
        """What to paste `[B, T, *]` onto, 0 where no sequence is, and one token more for what belongs nowhere."""
        new = like.new_empty if self.whole else like.new_zeros
        return new(self.tokens.numel() + 1, *like.shape[2:], dtype=self.dtype)

    def paste(self, places: Places, onto: Tensor, x: Tensor) -> None:
        """`[R, L, *]` onto `blank`; value heads that share a key head add up."""
        shared = self.heads // onto.shape[1]
        x = x if shared == 1 else x.unflatten(0, (-1, shared)).sum(1)
        onto.flatten(0, 1).index_copy_(0, places.rows(onto.shape[1]), x.flatten(0, 1))

    def pasted(self, onto: Tensor, dtype: torch.dtype) -> Tensor:
        """What was pasted, `[B, T, *]`."""
        return onto[:-1].unflatten(0, self.tokens).to(dtype)


def working_dtype(mean: Tensor) -> torch.dtype:
    """Return the dtype that beliefs have between tiles."""
    return torch.float64 if mean.shape[2] < NARROW else mean.dtype


def _tile(v: Tensor, mean: Tensor) -> int:
    """Tokens of a tile: a power of two, which `Decays` halves."""
    most = TILE if mean.shape[2] >= WIDE else TILE // 2
    return most if v.shape[1] >= most else 1 << (int(v.shape[1]) - 1).bit_length()


def _together(v: Tensor, mean: Tensor) -> int:
    """Steps of a block."""
    sequences, heads, width = mean.shape[:3]
    return max(1, min(STEPS, ROOM // (sequences * heads * width * width)))


def _every(v: Tensor, mean: Tensor) -> int:
    """Of so many steps, the belief before one is kept: of narrow keys it is no larger than its tokens."""
    return 1 if mean.shape[2] <= TILE else _together(v, mean)


def _under_way(step: int, v: Tensor, mean: Tensor, rows: Tensor | None) -> int:
    """Lanes at a step, at most: with so many tiles each, there are no more than all tiles allow."""
    sequences = mean.shape[0]
    if rows is None:
        return sequences
    tiles = v.shape[0] * v.shape[1] // _tile(v, mean) + sequences
    return min(sequences, tiles // (step + 1))
