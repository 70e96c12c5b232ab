"""PyTorch implementation of `attend_channels`: a pair of tokens has one weight per channel.

O(T (S + T) C) operations. Memory is that of a block of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.assembly import attend_with
from kalmix.ops._attend.dynamics import Dynamics, frequency_grad_carrier
from kalmix.ops._attend.kv_layout import KVLayout
from kalmix.ops._attend.query_blocks import map_query_blocks
from kalmix.ops._attend.scores import LagVariance, NoiseParams, score_config, variance_from_log_precision
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.products import masked_product
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend_channels(
    signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool
) -> Filtered:
    """Compute `kalmix.ops.experimental.attend_channels`."""
    return attend_with(_attend, signals, belief, segments, variance)


def _attend(layout: KVLayout, signals: AttendSignals, variance: bool) -> tuple[Tensor, Tensor | None]:
    """Attend between rotated tokens; intermediates are `[R, H, t, s, C]`."""
    (q, k, v, times, rank, *_), (*_, key_dynamics, value_dynamics, weighting) = layout, signals
    config, dtype, past_length = score_config(value_dynamics, weighting), q.dtype, k.shape[1] - q.shape[1]
    key_noise, value_noise = (
        _noise_params(x, dtype) for x in (key_dynamics, key_dynamics if value_dynamics is None else value_dynamics)
    )
    nu, temperature, floor = (x.to(dtype)[:, None, None, None] for x in weighting[:3])
    width = value_noise.rate.shape[-1]
    carrier, value_carrier = (_carrier(x.frequency, dtype) for x in (key_dynamics, value_dynamics or key_dynamics))
    q, k = (x.transpose(1, 2).unflatten(-1, (2, -1)) for x in (q, k))  # [L, H, t or s, 2, C]
    v = v.transpose(1, 2).unflatten(-1, (-1, 2, width))  # [L, H, s, value heads of a key head, 2, D]

    def attend_block(queries: slice, slots: slice) -> tuple[Tensor, ...]:
        query_slots = slice(past_length + queries.start, past_length + queries.stop)
        lag = (times[:, query_slots, None] - times[:, None, slots]).to(dtype)[:, None, ..., None]
        lag = lag.clamp(min=0) if config.causal else lag
        future = None if config.causal else lag < 0
        key_var = LagVariance.after(key_noise, lag.abs(), future)
        query_factor, key_factor = key_var.factors(floor)
        query, key = q[:, :, queries, None].unbind(-2), k[:, :, None, slots].unbind(-2)
        if carrier is not None:
            cos, sin = 1 - (carrier * lag).square() / 2, carrier * lag
            key = cos * key[0] - sin * key[1], cos * key[1] + sin * key[0]
        square = sum((query_factor * x - key_factor * y) ** 2 for x, y in zip(query, key, strict=True))
        ratio = (square / key_var.total).sum(-1, keepdim=True) / nu
        log_weight = -ratio.log1p() if config.rational else -ratio
        value_var = key_var if config.shared_dynamics else LagVariance.after(value_noise, lag.abs(), future)
        masked = ~config.visible(rank[:, query_slots], rank[:, slots])[..., None]
        scores = temperature * (log_weight - value_var.log(value_var.total))
        weights = (scores.masked_fill(masked, -torch.inf).log_softmax(-2) - value_noise.rate * lag).exp()
        value = v[:, :, slots]
        mean = _weighted_sum(weights, value)
        if value_carrier is not None:
            real, imaginary = value.unbind(-2)
            rotated_value, shift = torch.stack([-imaginary, real], -2), value_carrier * lag
            mean = mean + _weighted_sum(shift * weights, rotated_value)
            mean = mean - _weighted_sum(shift.square() / 2 * weights, value)
        mean = mean.flatten(3)
        if not variance:
            return (mean,)
        log_precision = (log_weight - value_var.log(value_var.state)).masked_fill(masked, -torch.inf).logsumexp(-2)
        return mean, variance_from_log_precision(log_precision).transpose(1, 2).repeat(1, 1, 1, 2)

    elements_per_query = q.shape[0] * q.shape[1] * k.shape[2] * max(width, q.shape[-1])
    mean, *output_variance = map_query_blocks(attend_block, config, rank, q.shape[2], elements_per_query)
    return mean, output_variance[0] if variance else None


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Sum values `[L, H, s, G, 2, D]` with weights `[L, H, t, s, D]`; return `[L, t, H, G, 2, D]`."""
    rows = masked_product(weights.movedim(-1, 2), value.flatten(3, 4).movedim(-1, 2))  # [L, H, D, t, 2 G]
    return rows.permute(0, 3, 1, 4, 2).unflatten(3, value.shape[3:5])


def _carrier(frequency: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return `frequency_grad_carrier` in shape `[H, 1, 1, C]`."""
    carrier = frequency_grad_carrier(frequency, dtype)
    return None if carrier is None else carrier[:, None, :, : frequency.shape[1]]


def _noise_params(dynamics: Dynamics, dtype: torch.dtype) -> NoiseParams:
    """Return rates and noises in shape `[H, 1, 1, C]`."""
    rows = (-dynamics.log_decay, dynamics.process_noise, dynamics.key_noise, dynamics.query_noise)
    return NoiseParams(*(x.to(dtype)[:, None, None] for x in rows))
