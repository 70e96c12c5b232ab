"""The Triton row of `diagonal`: custom ops around the kernels, which are imported when they first run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.scratch import SPACING, padded
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_launch_cache, with_precompilation
from kalmix.segments import Segments, segments_without_checks
from kalmix.types import Filtered


def diagonal(signals: DiagonalSignals, belief: DiagonalBelief, segments: Segments | None, variance: bool) -> Filtered:
    """See `kalmix.ops.diagonal`. Exact gradients; keeps a belief every 32 tokens for them, and no other state."""
    tensors = (*signals, *belief)
    rows = None if segments is None else segments.rows
    mean, var, last_mean, last_var, _ = _filter(*tensors, rows, variance, needs_grad(*tensors))
    return Filtered(mean, var if variance else None, DiagonalBelief(last_mean, last_var))


def _kept_shape(q: Tensor, v: Tensor, rows: Tensor | None, keep: bool) -> tuple[int, ...]:
    batch, length, heads, channels = v.shape
    whole = batch * ((length + SPACING - 1) // SPACING)
    count = whole if rows is None else batch * length // SPACING + rows.shape[0]
    return (count, 2, heads, channels, padded(q.shape[-1])) if keep else (0,)


def _forward_fake(q, k, v, precision, log_decay, process_noise, mean, var, rows, variance, keep):
    read_mean = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shapes = (v.shape if variance else (0,), mean.shape, var.shape, _kept_shape(q, v, rows, keep))
    return read_mean, *(torch.empty(shape, dtype=torch.float32, device=v.device) for shape in shapes)


def _forward(
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
    from kalmix.ops._diagonal.triton.forward import forward

    segments = None if rows is None else segments_without_checks(rows)
    kept = torch.empty(_kept_shape(q, v, rows, keep), dtype=torch.float32, device=v.device)
    return *forward(q, k, v, precision, log_decay, process_noise, mean, var, segments, variance, kept), kept


def _dry_run(*inputs):
    """Run the forward and the backward pass, to precompile their kernels."""
    *signals, _, _, rows, variance, keep = inputs
    read_mean, read_var, *last, kept = _forward(*inputs)
    follow: tuple[Any, ...] = (*signals, kept, rows, read_mean, read_var if variance else None, *last)
    if keep:
        _backward(*follow)


def _backward(
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
    from kalmix.ops._diagonal.triton.backward import backward

    segments = None if rows is None else segments_without_checks(rows)
    grads = (grad_mean, grad_var, grad_last_mean, grad_last_var)
    return backward(q, k, v, precision, log_decay, process_noise, kept, segments, *grads)


_filter = register_filter_op(
    "kalmix::diagonal_triton",
    with_precompilation(_dry_run, with_launch_cache(_forward)),
    _forward_fake,
    with_launch_cache(_backward),
    outputs=4,
    kernel="kernel 'triton' of `diagonal`",
)
