"""The Triton row of `dense`: custom ops around the kernels, which are imported when they first run."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import DenseBelief, PointBelief
from kalmix.kernels.delta import fused as mean_pass
from kalmix.kernels.dense.windows import WINDOW, padded
from kalmix.segments import Segments
from kalmix.types import Filtered


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    angle: Tensor | None,
    belief: DenseBelief,
    segments: Segments | None,
    variance: bool,
) -> Filtered:
    """See `kalmix.ops.dense`. The gains, which depend on the covariance alone, and then `delta` with them.

    Exact gradients, for which it keeps a covariance every 64 tokens and the gains.
    """
    tensors = (q, k, obs_noise, process_noise, log_decay, belief.covariance)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    rows = None if segments is None else segments.rows
    gain, read, last, _, _ = _gains(*tensors, rows, variance, keep)
    mean, _, after = mean_pass.delta(q, k, v, gain, log_decay, PointBelief(belief.mean), segments)
    return Filtered(mean, read if variance else None, DenseBelief(after.mean, last))


def _kept_shape(k: Tensor, heads: int, rows: Tensor | None, keep: bool) -> tuple[int, ...]:
    batch, length, _, width = k.shape
    whole = batch * ((length + WINDOW - 1) // WINDOW)
    count = whole if rows is None else batch * length // WINDOW + rows.shape[0]
    return (count, heads, padded(width), padded(width)) if keep else (0,)


@torch.library.custom_op("kalmix::dense_triton", mutates_args=())
def _gains(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    covariance: Tensor,
    rows: Tensor | None,
    variance: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.kernels.dense.triton import forward

    segments = None if rows is None else Segments(rows)
    kept = torch.empty(_kept_shape(k, obs_noise.shape[2], rows, keep), dtype=torch.float32, device=k.device)
    with torch.cuda.device_of(k):
        out = forward(q, k, obs_noise, process_noise, log_decay, covariance, segments, variance, kept)
    return *out, kept


@_gains.register_fake
def _(q, k, obs_noise, process_noise, log_decay, covariance, rows, variance, keep):
    tokens, kept = tuple(obs_noise.shape), _kept_shape(k, obs_noise.shape[2], rows, keep)
    shapes = ((*tokens, k.shape[3]), (*tokens, 1) if variance else (0,), covariance.shape, tokens, kept)
    return tuple(torch.empty(shape, dtype=torch.float32, device=k.device) for shape in shapes)


@torch.library.custom_op("kalmix::dense_triton_backward", mutates_args=())
def _gradients(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    gain: Tensor,
    scale: Tensor,
    kept: Tensor,
    rows: Tensor | None,
    grad_gain: Tensor,
    grad_read: Tensor | None,
    grad_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.kernels.dense.triton_backward import backward

    segments = None if rows is None else Segments(rows)
    signals = (q, k, obs_noise, process_noise, log_decay)
    with torch.cuda.device_of(k):
        return backward(*signals, gain, scale, kept, segments, grad_gain, grad_read, grad_last)


@_gradients.register_fake
def _(q, k, obs_noise, process_noise, log_decay, gain, scale, kept, rows, grad_gain, grad_read, grad_last):
    nothing = k.new_empty(0)
    by_query, by_decay = nothing if grad_read is None else q, nothing if log_decay is None else log_decay
    like = (by_query, k, obs_noise, process_noise, by_decay, grad_last)
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like)


def _setup(ctx, inputs, output):
    *signals, covariance, rows, variance, _ = inputs
    gain, _, _, scale, kept = output
    ctx.save_for_backward(*signals, gain, scale, kept, rows)
    ctx.mark_non_differentiable(scale, kept)
    ctx.set_materialize_grads(False)
    ctx.belief, ctx.variance = covariance.shape, variance


def _backward(ctx, grad_gain, grad_read, grad_last, _, __):
    *signals, gain, scale, kept, rows = ctx.saved_tensors
    if grad_gain is None:
        grad_gain = torch.zeros_like(gain)
    if grad_last is None:
        grad_last = gain.new_zeros(ctx.belief)
    asked = grad_read if ctx.variance else None
    by_query, *direct, by_decay, by_prior = _gradients(*signals, gain, scale, kept, rows, grad_gain, asked, grad_last)
    by_query, by_decay = None if asked is None else by_query, None if signals[4] is None else by_decay
    return by_query, *direct, by_decay, by_prior, None, None, None


_gains.register_autograd(_backward, setup_context=_setup)
