"""`diagonal`, step by step: the recursion as it is written, for tests and for float64. Memory O(T K V)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.step_loop import Readouts, fill_outside, optional_segment_ids, run_steps
from kalmix.segments import Segments
from kalmix.types import Filtered


def diagonal(signals: DiagonalSignals, belief: DiagonalBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Equations 16 to 23 of Kalman Linear Attention in the moment form, one token at a time, any autograd.

    Takes `log_decay` and `process_noise` as `[G, K, V]` or `[B, T, G, K, V]`. See `kalmix.ops.diagonal`.
    """
    q, k, v, precision, log_decay, process_noise = signals
    batch, length, heads, _ = v.shape
    dtype, segment_ids = belief.mean.dtype, optional_segment_ids(segments, batch, length)
    q, k, v, precision = fill_outside(segment_ids, q, k, v, precision)
    if log_decay.ndim == 5:
        log_decay, process_noise = fill_outside(segment_ids, log_decay, process_noise)
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2)[..., None] for x in (q, k))  # [B, T, G, K, 1]
    v_rows, w_rows = v.to(dtype)[..., None, :], precision.to(dtype)[..., None, :]  # [B, T, G, 1, V]
    dynamics = (_per_token(x, length) for x in (log_decay.to(dtype).exp(), process_noise.to(dtype)))
    # Unbound once: taking one token at a time out of a tensor would make its gradient O(T^2).
    tokens = zip(*(x.unbind(1) for x in (q, k, v_rows, w_rows)), *dynamics, strict=True)
    reads, after = run_steps(_step, belief, tokens, segment_ids)
    return Filtered(reads[0].to(v.dtype), reads[1] if variance else None, after)


def _step(
    belief: DiagonalBelief, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, decay: Tensor, noise: Tensor
) -> tuple[Readouts, DiagonalBelief]:
    mean, var = decay * belief.mean, decay**2 * belief.variance + noise
    write = key * weight
    var = var / (1 + key * write * var)
    mean = mean + var * write * (value - key * mean)
    return ((query * mean).sum(-2), (query**2 * var).sum(-2)), DiagonalBelief(mean, var)


def _per_token(x: Tensor, length: int) -> Sequence[Tensor]:
    return [x] * length if x.ndim == 3 else x.unbind(1)
