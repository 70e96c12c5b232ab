"""`additive` token by token: the plain recursion, for tests and float64. Training stores O(T K V) numbers."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._shared.step_loop import Readouts, fill_outside, optional_segment_ids, run_steps
from kalmix.segments import Segments
from kalmix.types import Filtered


def additive(signals: AdditiveSignals, belief: PointBelief, segments: Segments | None) -> Filtered:
    """Compute equation 19 of Memory by Design, with derivatives of any order. See `kalmix.ops.additive`."""
    batch, length, heads, _ = signals.v.shape
    dtype, segment_ids = belief.mean.dtype, optional_segment_ids(segments, batch, length)
    q, k, v, log_decay, gain = fill_outside(segment_ids, *signals)
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2)[..., None] for x in (q, k))  # [B, T, G, K, 1]
    value = v.to(dtype) if gain is None else v.to(dtype) * gain.to(dtype)[..., None]
    decay = k.new_ones(()).expand(v.shape[:3]) if log_decay is None else log_decay.to(dtype).exp()
    decay = (decay if decay.ndim == 4 else decay[..., None])[..., None]  # [B, T, G, K or 1, 1]
    tokens = zip(*(x.unbind(1) for x in (q, k, value[..., None, :], decay)), strict=True)
    (mean,), final = run_steps(_step, belief, tokens, segment_ids)
    return Filtered(mean.to(v.dtype), None, final)


def _step(
    belief: PointBelief, query: Tensor, key: Tensor, value: Tensor, decay: Tensor
) -> tuple[Readouts, PointBelief]:
    mean = decay * belief.mean + key * value
    return ((query * mean).sum(-2),), PointBelief(mean)
