"""`diagonal` token by token: the plain recursion, for tests and float64. Training stores O(T K V) numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.step_loop import Readouts, fill_outside, optional_segment_ids, run_steps
from kalmix.segments import Segments
from kalmix.types import Filtered


def diagonal(signals: DiagonalSignals, belief: DiagonalBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute equations 16 to 23 of Kalman Linear Attention in moment form, with derivatives of any order.

    `log_decay` and `process_noise` may be `[G, K, V]` or `[B, T, G, K, V]`. See `kalmix.ops.diagonal`.
    """
    q, k, v, precision, log_decay, process_noise = signals
    batch, length, heads, _ = v.shape
    dtype, segment_ids = belief.mean.dtype, optional_segment_ids(segments, batch, length)
    q, k, v, precision = fill_outside(segment_ids, q, k, v, precision)
    log_decay, process_noise = (
        fill_outside(segment_ids, x)[0] if x.ndim == 5 else x for x in (log_decay, process_noise)
    )
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2)[..., None] for x in (q, k))  # [B, T, G, K, 1]
    v_rows, w_rows = v.to(dtype)[..., None, :], precision.to(dtype)[..., None, :]  # [B, T, G, 1, V]
    dynamics = (_per_token(x, length) for x in (log_decay.to(dtype).exp(), process_noise.to(dtype)))
    # Unbind once: the gradient of indexing each token separately would take O(T^2) time.
    tokens = zip(*(x.unbind(1) for x in (q, k, v_rows, w_rows)), *dynamics, strict=True)
    readouts, final = run_steps(_step, belief, tokens, segment_ids)
    return Filtered(readouts[0].to(v.dtype), readouts[1] if variance else None, final)


def _step(
    belief: DiagonalBelief, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, decay: Tensor, noise: Tensor
) -> tuple[Readouts, DiagonalBelief]:
    mean, var = decay * belief.mean, decay**2 * belief.variance + noise
    weighted_key = key * weight
    var = var / (1 + key * weighted_key * var)
    mean = mean + var * weighted_key * (value - key * mean)
    return ((query * mean).sum(-2), (query**2 * var).sum(-2)), DiagonalBelief(mean, var)


def _per_token(x: Tensor, length: int) -> Sequence[Tensor]:
    return [x] * length if x.ndim == 3 else x.unbind(1)
