"""Kernel "reference" of `dense`: one token at a time, with plain autograd, for tests and for float64.

Training stores O(T K (K + V)) numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense.joseph import joseph_update, subtract_product
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._shared.products import product
from kalmix.ops._shared.step_loop import Readouts, fill_outside, optional_segment_ids, run_steps
from kalmix.segments import Segments
from kalmix.types import Filtered


def dense(signals: DenseSignals, belief: DenseBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute `kalmix.ops.dense` one token at a time."""
    q, k, v, obs_noise, process_noise, log_decay, angle = signals
    batch, length, heads, _ = v.shape
    dtype, width, segment_ids = belief.mean.dtype, q.shape[3], optional_segment_ids(segments, batch, length)
    q, k, v, process_noise, log_decay, angle = fill_outside(segment_ids, q, k, v, process_noise, log_decay, angle)
    (obs_noise,) = fill_outside(segment_ids, obs_noise, fill=1.0)
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2)[..., None] for x in (q, k))  # [B, T, G, K, 1]
    decay = k.new_ones(()).expand(v.shape[:3]) if log_decay is None else log_decay.to(dtype).exp()
    decay = decay[..., None, None] if decay.ndim == 3 else decay.repeat(1, 1, 1, width // decay.shape[3])[..., None]
    noise = process_noise.to(dtype)[..., None] * _diffusion_mask(k, angle is not None)  # [B, T, G, K]
    noises = (torch.diag_embed(noise), obs_noise.to(dtype)[..., None, None])
    rotations = [(None, None)] * length
    if angle is not None:
        angle = angle.to(dtype)  # convert once, so that gradients of cosine and sine are summed in `dtype`
        rotations = zip(*(x(angle)[..., None].unbind(1) for x in (torch.cos, torch.sin)), strict=True)
    tokens = zip(*(x.unbind(1) for x in (q, k, v.to(dtype)[..., None, :], decay, *noises)), rotations, strict=True)
    reads, after = run_steps(_step, belief, tokens, segment_ids)
    return Filtered(reads[0].to(v.dtype), reads[1] if variance else None, after)


def _diffusion_mask(like: Tensor, paired: bool) -> Tensor:
    """Return a mask `[K]` of the rows that receive process noise: all, or the first half if rows are pairs."""
    width = like.shape[3]
    return torch.arange(width, device=like.device) < (width // 2 if paired else width)


def _step(
    belief: DenseBelief,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    process_cov: Tensor,
    noise: Tensor,
    rotation: tuple[Tensor | None, Tensor | None],
) -> tuple[Readouts, DenseBelief]:
    """Compute one token: predict, update, read."""
    mean = decay * _rotate(belief.mean, *rotation)
    covariance = (
        decay * _rotate((decay * _rotate(belief.covariance, *rotation)).mT, *rotation) + process_cov
    )  # P is symmetric
    cov_key = product(covariance, key)
    gain = cov_key / (noise + product(key.mT, cov_key))
    mean = mean + gain * (value - product(key.mT, mean))
    transition_cov = subtract_product(covariance, gain, cov_key.mT)
    covariance = joseph_update(transition_cov, transition_cov, None, gain, key.mT, noise)
    variance = product(product(query.mT, covariance), query)
    return (product(query.mT, mean)[..., 0, :], variance[..., 0]), DenseBelief(mean, covariance)


def _rotate(rows: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Rotate every pair of rows of `[B, G, K, *]`."""
    if cos is None or sin is None:
        return rows
    observed, hidden = rows.chunk(2, -2)
    return torch.cat([cos * observed - sin * hidden, sin * observed + cos * hidden], -2)
