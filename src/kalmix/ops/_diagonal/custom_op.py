"""The Triton row of `diagonal`: custom ops around the kernels, which are imported when they first run."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.scratch import SPACING, padded
from kalmix.ops._shared.custom_op import operator, register_backward
from kalmix.segments import Segments, unchecked
from kalmix.types import Filtered


def diagonal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    belief: DiagonalBelief,
    segments: Segments | None,
    variance: bool,
) -> Filtered:
    """See `kalmix.ops.diagonal`. Exact gradients; keeps a belief every 32 tokens for them, and no other state."""
    tensors = (q, k, v, precision, log_decay, process_noise, *belief)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    rows = None if segments is None else segments.rows
    mean, var, last_mean, last_var, _ = _filter(*tensors, rows, variance, keep)
    return Filtered(mean, var if variance else None, DiagonalBelief(last_mean, last_var))


def _kept_shape(q: Tensor, v: Tensor, rows: Tensor | None, keep: bool) -> tuple[int, ...]:
    batch, length, heads, channels = v.shape
    whole = batch * ((length + SPACING - 1) // SPACING)
    count = whole if rows is None else batch * length // SPACING + rows.shape[0]
    return (count, 2, heads, channels, padded(q.shape[-1])) if keep else (0,)


@operator("kalmix::diagonal_triton")
def _filter(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    mean: Tensor,
    var: Tensor,
    rows: Tensor | None,
    variance: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._shared.triton.compile_and_launch import perform, rehearse

    inputs = (q, k, v, precision, log_decay, process_noise, mean, var, rows, variance, keep)
    with torch.cuda.device_of(v):
        rehearse(_there_and_back, *inputs)
        return perform(_forward, *inputs)


@torch.library.register_fake(_filter)
def _(q, k, v, precision, log_decay, process_noise, mean, var, rows, variance, keep):
    read_mean = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shapes = (v.shape if variance else (0,), mean.shape, var.shape, _kept_shape(q, v, rows, keep))
    return read_mean, *(torch.empty(shape, dtype=torch.float32, device=v.device) for shape in shapes)


def _forward(q, k, v, precision, log_decay, process_noise, mean, var, rows, variance, keep):
    from kalmix.ops._diagonal.triton.forward import forward

    segments = None if rows is None else unchecked(rows)
    kept = torch.empty(_kept_shape(q, v, rows, keep), dtype=torch.float32, device=v.device)
    return *forward(q, k, v, precision, log_decay, process_noise, mean, var, segments, variance, kept), kept


def _there_and_back(*inputs):
    """All that is going to run, for a rehearsal."""
    *signals, _, _, rows, variance, keep = inputs
    read_mean, read_var, *last, kept = _forward(*inputs)
    if keep:
        _backward(*signals, kept, rows, read_mean, read_var if variance else None, *last)


@operator("kalmix::diagonal_triton_backward")
def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    kept: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_var: Tensor | None,
    grad_last_mean: Tensor,
    grad_last_var: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._shared.triton.compile_and_launch import perform

    grads = (grad_mean, grad_var, grad_last_mean, grad_last_var)
    with torch.cuda.device_of(v):
        return perform(_backward, q, k, v, precision, log_decay, process_noise, kept, rows, *grads)


@torch.library.register_fake(_gradients)
def _(q, k, v, precision, log_decay, process_noise, kept, rows, grad_mean, grad_var, grad_last_mean, grad_last_var):
    like = (q, k, v, precision, log_decay, process_noise, grad_last_mean, grad_last_var)
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like)


def _backward(q, k, v, precision, log_decay, process_noise, kept, rows, *grads):
    from kalmix.ops._diagonal.triton.backward import backward

    segments = None if rows is None else unchecked(rows)
    return backward(q, k, v, precision, log_decay, process_noise, kept, segments, *grads)


def _setup(ctx, inputs, output):
    *signals, mean, _, rows, variance, _ = inputs
    ctx.save_for_backward(*signals, output[4], rows)
    ctx.mark_non_differentiable(output[4])
    ctx.set_materialize_grads(False)
    ctx.belief, ctx.variance = mean.shape, variance


def _adjoint(ctx, grad_mean, grad_var, grad_last_mean, grad_last_var, _):
    *signals, kept, rows = ctx.saved_tensors
    v = signals[2]
    if grad_mean is None:
        grad_mean = v.new_zeros(()).expand(v.shape)
    nothing = kept.new_zeros(()).expand(ctx.belief)
    last = (nothing if x is None else x for x in (grad_last_mean, grad_last_var))
    return *_gradients(*signals, kept, rows, grad_mean, grad_var if ctx.variance else None, *last), None, None, None


register_backward(_filter, "kernel 'triton' of `diagonal`", _adjoint, _setup)
