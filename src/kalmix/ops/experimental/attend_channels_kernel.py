"""`attend_channels`: a decay and a noise for every channel, so that a pair of tokens has as many weights.

O(T^2 C) work; memory is that of a tile of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.assembly import assemble
from kalmix.ops._attend.dynamics import Dynamics, owed
from kalmix.ops._attend.kv_layout import Lanes
from kalmix.ops._attend.query_blocks import some_at_a_time
from kalmix.ops._attend.scores import Noise, Spread, rules_of, variance_of
from kalmix.ops._attend.signals import AttendSignals
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend_channels(
    signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool
) -> Filtered:
    """The tensor form of Adaptive Filter Attention. See `kalmix.ops.experimental.attend_channels`."""
    return assemble(_attend, signals, belief, segments, variance)


def _attend(lanes: Lanes, signals: AttendSignals, variance: bool) -> tuple[Tensor, Tensor | None]:
    """Tiles are `[L, H, t, s, C]`."""
    (q, k, v, times, rank, *_), (*_, keys, values, weighing) = lanes, signals
    rules, dtype, past = rules_of(values, weighing), q.dtype, k.shape[1] - q.shape[1]
    of_keys, of_values = (_noise(x, dtype) for x in (keys, keys if values is None else values))
    nu, temperature, floor = (x.to(dtype)[:, None, None, None] for x in weighing[:3])
    width = of_values.rate.shape[-1]
    slip, own_slip = (_slip(x.frequency, dtype) for x in (keys, values or keys))
    q, k = (x.transpose(1, 2).unflatten(-1, (2, -1)) for x in (q, k))  # [L, H, t or s, 2, C]
    v = v.transpose(1, 2).unflatten(-1, (-1, 2, width))  # [L, H, s, value heads of a key head, 2, D]

    def read(queries: slice, slots: slice) -> tuple[Tensor, ...]:
        own = slice(past + queries.start, past + queries.stop)
        lag = (times[:, own, None] - times[:, None, slots]).to(dtype)[:, None, ..., None]
        lag = lag.clamp(min=0) if rules.causal else lag
        ahead = None if rules.causal else lag < 0
        near = Spread.after(of_keys, lag.abs(), ahead)
        of_query, of_key = near.factors(floor)
        query, key = q[:, :, queries, None].unbind(-2), k[:, :, None, slots].unbind(-2)
        if slip is not None:
            cos, sin = 1 - (slip * lag).square() / 2, slip * lag
            key = cos * key[0] - sin * key[1], cos * key[1] + sin * key[0]
        square = sum((of_query * x - of_key * y) ** 2 for x, y in zip(query, key, strict=True))
        ratio = (square / near.whole).sum(-1, keepdim=True) / nu
        log_weight = -ratio.log1p() if rules.rational else -ratio
        far = near if rules.shared else Spread.after(of_values, lag.abs(), ahead)
        hidden = ~rules.sees(rank[:, own], rank[:, slots])[..., None]
        scores = temperature * (log_weight - far.log(far.whole))
        weights = (scores.masked_fill(hidden, -torch.inf).log_softmax(-2) - of_values.rate * lag).exp()
        value = v[:, :, slots]
        mean = torch.einsum("lhtsd,lhsgxd->lthgxd", weights, value)
        if own_slip is not None:
            real, imaginary = value.unbind(-2)
            late, shift = torch.stack([-imaginary, real], -2), own_slip * lag
            mean = mean + torch.einsum("lhtsd,lhsgxd->lthgxd", shift * weights, late)
            mean = mean - torch.einsum("lhtsd,lhsgxd->lthgxd", shift.square() / 2 * weights, value)
        mean = mean.flatten(3)
        if not variance:
            return (mean,)
        log_precision = (log_weight - far.log(far.certain)).masked_fill(hidden, -torch.inf).logsumexp(-2)
        return mean, variance_of(log_precision).transpose(1, 2).repeat(1, 1, 1, 2)

    entries = q.shape[0] * q.shape[1] * k.shape[2] * max(width, q.shape[-1])
    mean, *spread = some_at_a_time(read, rules, times[:, past:], k.shape[2], entries)
    return mean, spread[0] if variance else None


def _slip(frequency: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`owed`, `[H, 1, 1, C]`."""
    slip = owed(frequency, dtype)
    return None if slip is None else slip[:, None, :, : frequency.shape[1]]


def _noise(dynamics: Dynamics, dtype: torch.dtype) -> Noise:
    """Numbers `[H, 1, 1, C]`."""
    rows = (-dynamics.log_decay, dynamics.process_noise, dynamics.key_noise, dynamics.query_noise)
    return Noise(*(x.to(dtype)[:, None, None] for x in rows))
