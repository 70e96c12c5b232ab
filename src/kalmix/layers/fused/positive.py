"""Map from real to positive numbers for learned parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import KNEE, uses_triton
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher


def positive(raw: Tensor) -> Tensor:
    """Map a real number to a positive one: exp(raw) for |raw| <= 8, a power of |raw| beyond.

    `exp` and `softplus` underflow in float32 near raw = -104 and `exp` overflows near 88, where the gradient vanishes.
    Here the logarithm grows like 8 log |raw| beyond 8, with continuous value and slope: at |raw| = 80 the value is
    e^26.4 or its inverse, and the gradient of its logarithm is 8 / |raw|.

    Args:
        raw: tensor of any shape.

    Returns:
        A tensor of the same shape and dtype.

    Complexity: O(1) per element. Training stores `raw` and the result.

    Example:
        >>> from kalmix.layers.fused import positive
        >>> positive(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.3679, 1.0000, 2.7183])
    """
    if raw.dtype == torch.float32 and uses_triton("positive", raw):
        return _positive(raw)
    return _eager(raw)


def _eager(raw: Tensor) -> Tensor:
    size = raw.abs()
    slow = raw.sign() * KNEE * (1 + (size.clamp(min=KNEE) / KNEE).log())
    return torch.where(size <= KNEE, raw, slow).exp()


def _forward_fake(raw):
    return raw.new_empty(raw.shape)


def _forward(raw: Tensor) -> Tensor:
    from kalmix.layers.fused.triton.positive import forward

    return forward(raw)


def _backward_fake(raw, result, grad):
    return raw.new_empty(raw.shape)


def _backward(raw: Tensor, result: Tensor, grad: Tensor) -> Tensor:
    from kalmix.layers.fused.triton.positive import backward

    return backward(raw, result, grad)


_positive_op = custom_op("kalmix::positive", with_launch_cache(_forward), _forward_fake)
_positive_backward = without_dispatcher(
    custom_op("kalmix::positive_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _gradients(ctx: Any, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else _positive_backward(*ctx.saved_tensors, grad)


def _differentiable_gradients(ctx: Any, grad: Tensor | None) -> Tensor | None:
    return differentiate(lambda raw: (_eager(raw),), ctx.saved_tensors[:1], [grad])[0]


_positive = register_gradients(_positive_op, _setup, _gradients, _differentiable_gradients)
