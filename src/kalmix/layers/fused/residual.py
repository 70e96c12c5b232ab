"""Residual connection and the norm that follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import output_dtype, uses_triton
from kalmix.layers.fused.rms import Norm, eager_rms_norm
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum: return s = x + residual and weight s / sqrt(mean(s^2) + eps).

    Args:
        x: `[..., E]`.
        residual: `[..., E]`, or a shape that broadcasts with `x`.
        weight: `[E]`.
        eps: number added to the mean square.

    Returns:
        The sum in the wider of both dtypes, and the norm in that dtype or in autocast's.

    Complexity: O(1) per element. Training stores the sum and the weight.

    Example:
        >>> from kalmix.layers.fused import add_rms_norm
        >>> add_rms_norm(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 0.0]), torch.ones(2), eps=0.0)
        (tensor([3., 4.]), tensor([0.8485, 1.1314]))
    """
    if x.shape == residual.shape and uses_triton("add_rms_norm", x, weight.shape[0]):
        dtype = output_dtype(x.device, torch.promote_types(x.dtype, residual.dtype))
        normalized, total = _add_rms_norm(x, residual, weight, eps, dtype)
        return total, normalized
    total = x + residual
    return total, eager_rms_norm(total, weight, _norm(weight, eps)).to(output_dtype(total.device, total.dtype))


def _norm(weight: Tensor, eps: float) -> Norm:
    return Norm(weight.shape[0], eps)


def _forward_fake(x, residual, weight, eps, dtype):
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return x.new_empty(x.shape, dtype=dtype), total


def _forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the norm and the sum."""
    from kalmix.layers.fused.triton.rms import NormOptions, forward

    total_dtype = torch.promote_types(x.dtype, residual.dtype)
    return forward(x, residual, weight, NormOptions(*_norm(weight, eps)), dtype, total_dtype)


def _backward_fake(total, weight, grad, total_grad, eps, copy_dtype):
    copy = total.new_empty(0 if copy_dtype is None else total.shape, dtype=copy_dtype)
    return total.new_empty(total.shape), copy, weight.new_empty(weight.shape)


def _backward(
    total: Tensor, weight: Tensor, grad: Tensor, total_grad: Tensor | None, eps: float, copy_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the sum, a copy of it in `copy_dtype` (empty if `None`), and that of the weight."""
    from kalmix.layers.fused.triton.rms import NormOptions, backward

    return backward(total, None, weight, grad, NormOptions(*_norm(weight, eps)), total_grad, copy_dtype)


_add_rms_norm_op = custom_op("kalmix::add_rms_norm", with_launch_cache(_forward), _forward_fake)
_add_rms_norm_backward = without_dispatcher(
    custom_op("kalmix::add_rms_norm_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.dtypes, ctx.dtype = (x.dtype, residual.dtype), output[0].dtype


def _gradients(ctx: Any, grad: Tensor | None, total_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    found: dict[torch.dtype | None, Tensor] = {}
    if grad is None:
        wide, dweight = total_grad, None
    else:
        copy_dtype = next((dtype for dtype in ctx.dtypes if dtype != total.dtype), None)
        wide, copy, dweight = _add_rms_norm_backward(total, weight, grad, total_grad, ctx.eps, copy_dtype)
        found[copy_dtype] = copy

    def converted(dtype: torch.dtype) -> Tensor | None:
        if dtype in found:
            return found[dtype]
        return None if wide is None else wide.to(dtype)

    return *map(converted, ctx.dtypes), dweight, None, None


def _differentiable_gradients(ctx: Any, grad: Tensor | None, total_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    def function(total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return eager_rms_norm(total, weight, _norm(weight, ctx.eps)).to(ctx.dtype), total

    wide, dweight = differentiate(function, ctx.saved_tensors, [grad, total_grad])
    dx, dresidual = (None if wide is None else wide.to(dtype) for dtype in ctx.dtypes)
    return dx, dresidual, dweight, None, None


_add_rms_norm = register_gradients(_add_rms_norm_op, _setup, _gradients, _differentiable_gradients)
