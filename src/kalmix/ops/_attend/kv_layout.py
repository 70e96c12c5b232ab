"""Where queries and keys of a call lie: lanes, in which the queries are the last of the keys.

A lane is a sequence: its history, and then a batch row. Sequences packed into one row share that row as their lane,
unless they have histories: then each has a lane of its own, with a copy of the row. `rank` says in one number what a
query sees: a token's position in its sequence, sequences `FAR` apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.segments import Segments

FAR = 1 << 40  # between the ranks of two sequences
NOWHERE = -(1 << 60)  # the rank of a slot without a token: such see one another, and nothing else sees them


class Lanes(NamedTuple):
    """L lanes of S keys, the last T of which have queries.

    Attributes:
        q: `[L, T, H, K]`, k: `[L, S, H, K]` and v: `[L, S, G, V]`, in the dtype of the belief.
        times: float64 `[L, S]`, since the earliest of the sequence.
        rank: int64 `[L, S]`; a causal query sees keys whose rank is at most its own, by less than a window.
        after: the belief after the call.
        segment_ids: the sequence of each token of the call, `[B, T]`, -1 for none; `None` where a row is a sequence.
        copied: whether rows were copied, a lane for every sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    times: Tensor
    rank: Tensor
    after: HistoryBelief
    segment_ids: Tensor | None
    copied: bool

    def paste(self, x: Tensor) -> Tensor:
        """What queries read, `[L, T, H, *]`, at their tokens, `[B, T, H, *]`; 0 at tokens of no sequence."""
        if self.segment_ids is None:
            return x
        if self.copied:
            x = x[self.segment_ids.clamp(min=0), torch.arange(x.shape[1], device=x.device)]
        return torch.where((self.segment_ids >= 0)[..., None, None], x, 0)


def lay_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    times: Tensor | None,
    belief: HistoryBelief,
    segments: Segments | None,
    window: int | None,
) -> Lanes:
    """The lanes of a call. Gradients reach q, k, v and the prior; no host sync; nothing is copied that may stay."""
    dtype, device, (batch, length) = belief.keys.dtype, k.device, k.shape[:2]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    past = belief.positions.shape[1] > 0
    if segments is None and not past:  # every slot holds a token, and no lane more than a sequence
        position = torch.arange(length, device=device).expand(batch, length)
        now = position.double() if times is None else times.detach().double()
        since = now if times is None else now - now[:, :1]
        return Lanes(q, k, v, since, position, _shown(HistoryBelief(k, v, now, position), window), None, False)

    segment_ids = None if segments is None else segments.segment_ids(batch, length)
    sequence = torch.arange(batch, device=device)[:, None] if segment_ids is None else segment_ids.clamp(min=0)
    position, clock = (x.expand(batch, length) for x in _places(belief, segments, sequence, length))
    now = clock if times is None else times.detach().double()
    if segment_ids is not None:
        inside = segment_ids >= 0
        q, k, v = (torch.where(inside[..., None, None], x, 0) for x in (q, k, v))
        position, now = torch.where(inside, position, -1), torch.where(inside, now, 0)
    row = HistoryBelief(k, v, now, position)

    own = row if segments is None or segment_ids is None else _dealt(row, segments, segment_ids)
    after = HistoryBelief(*(torch.cat(x, 1) for x in zip(belief, own, strict=True))) if past else own
    copied = segments is not None and past
    if segments is not None and copied:
        q = q[segments.rows[:, 0].long()]
    if segment_ids is not None and not copied:
        lanes = row
    else:
        lanes, sequence = after, torch.arange(after.positions.shape[0], device=device)[:, None]
    held = lanes.positions >= 0
    rank = torch.where(held, sequence * FAR + lanes.positions, NOWHERE)
    if segments is not None and not copied:  # each sequence has its own clock: a lane may hold several
        first = now.gather(1, segments.rows[:, 1].long()[sequence].clamp(max=length - 1))
    else:
        first = torch.where(held & lanes.times.isfinite(), lanes.times, torch.inf).amin(1, keepdim=True)
    since = torch.where(held, lanes.times - first, 0)
    return Lanes(q, lanes.keys, lanes.values, since, rank, _shown(after, window), segment_ids, copied)


def _shown(after: HistoryBelief, window: int | None) -> HistoryBelief:
    """What a window keeps."""
    return after if window is None or after.positions.shape[1] <= window else after.newest(window)


def _places(belief: HistoryBelief, segments: Segments | None, sequence: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Positions, and times where none are given, of tokens that belong to the sequences `[B, T]`: both go on."""
    positions, times = belief.positions, belief.times
    within = torch.arange(length, device=positions.device)
    if segments is not None:
        within = within - segments.rows[:, 1].long()[sequence]
    if not positions.shape[1]:
        return within, within.double()
    seen = positions.amax(1) + 1
    clock = torch.where(seen > 0, torch.where(positions >= 0, times, -torch.inf).amax(1) + 1, 0)
    return seen[sequence] + within, clock[sequence] + within


def _dealt(row: HistoryBelief, segments: Segments, segment_ids: Tensor) -> HistoryBelief:
    """To each sequence the row it lies in, with its own positions; one row serves all without copies."""
    index, count = segments.rows[:, 0].long(), segments.count
    keys, values, times, positions, segment_ids = (
        x.expand(count, *x.shape[1:]) if x.shape[0] == 1 else x[index] for x in (*row, segment_ids)
    )
    mine = segment_ids == torch.arange(count, device=segment_ids.device)[:, None]
    return HistoryBelief(keys, values, times, torch.where(mine, positions, -1))
