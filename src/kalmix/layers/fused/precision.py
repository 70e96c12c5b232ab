"""Observation precision from an unconstrained projection."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import uses_triton
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher
from kalmix.types import belief_dtype

NOISE_FLOOR = 1e-4  # default of `floor` in layers: smallest variance of an observation


def softplus_precision(raw: Tensor, floor: float) -> Tensor:
    """Return the precision 1 / (softplus(raw) + floor) in the dtype of beliefs.

    Args:
        raw: `[..., C]`. May be a view of a wider tensor.
        floor: smallest variance.

    Returns:
        `[..., C]` in float32, or in float64 if `raw` is float64.

    Complexity: O(1) per element. Training stores `raw` and the result.

    Example:
        >>> from kalmix.layers.fused import softplus_precision
        >>> softplus_precision(torch.tensor([0.0, 100.0]), 1e-4)
        tensor([1.4425, 0.0100])
    """
    return _precision(raw, floor) if uses_triton("softplus_precision", raw) else _eager(raw, floor)


def _eager(raw: Tensor, floor: float) -> Tensor:
    return (F.softplus(raw.to(belief_dtype(raw.dtype))) + floor).reciprocal()


def _forward_fake(raw, floor):
    return raw.new_empty(raw.shape, dtype=belief_dtype(raw.dtype))


def _forward(raw: Tensor, floor: float) -> Tensor:
    from kalmix.layers.fused.triton.precision import forward

    return forward(raw, floor)


def _backward_fake(raw, precision, grad):
    return raw.new_empty(raw.shape)


def _backward(raw: Tensor, precision: Tensor, grad: Tensor) -> Tensor:
    from kalmix.layers.fused.triton.precision import backward

    return backward(raw, precision, grad)


_precision_op = custom_op("kalmix::softplus_precision", with_launch_cache(_forward), _forward_fake)
_precision_backward = without_dispatcher(
    custom_op("kalmix::softplus_precision_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.floor = inputs[1]


def _gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
    return None if grad is None else _precision_backward(*ctx.saved_tensors, grad), None


def _differentiable_gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
    return differentiate(lambda raw: (_eager(raw, ctx.floor),), ctx.saved_tensors[:1], [grad])[0], None


_precision = register_gradients(_precision_op, _setup, _gradients, _differentiable_gradients)
