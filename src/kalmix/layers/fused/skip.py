"""Skip connection with a scale per column, and the gate that follows it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import uses_triton
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher


def gated_skip(x: Tensor, z: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    """Add a scaled skip connection and multiply by a gate: (x + scale z) silu(gate).

    Args:
        x: `[..., C]`.
        z: `[..., C]`, the skip connection.
        scale: `[C]`.
        gate: `[..., C]`, input of the gate. May be a view of a wider tensor, as may `x` and `z`.

    Returns:
        `[..., C]` in the wider dtype of `x`, `z` and `gate`.

    Complexity: O(1) per element. Training stores the inputs.

    Example:
        >>> from kalmix.layers.fused import gated_skip
        >>> gated_skip(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([100.0]))
        tensor([200.])
    """
    if x.shape == z.shape == gate.shape and uses_triton("gated_skip", x):
        return _gated_skip(x, z, scale, gate)
    return _eager(x, z, scale, gate)[0]


def _eager(x: Tensor, z: Tensor, scale: Tensor, gate: Tensor) -> tuple[Tensor]:
    return ((x + scale.to(z.dtype) * z) * F.silu(gate),)


def _forward_fake(x, z, scale, gate):
    return x.new_empty(x.shape, dtype=torch.promote_types(torch.promote_types(x.dtype, z.dtype), gate.dtype))


def _forward(x: Tensor, z: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    from kalmix.layers.fused.triton.skip import forward

    return forward(x, z, scale, gate)


def _backward_fake(x, z, scale, gate, grad):
    return tuple(y.new_empty(y.shape) for y in (x, z, scale, gate))


def _backward(x: Tensor, z: Tensor, scale: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from kalmix.layers.fused.triton.skip import backward

    return backward(x, z, scale, gate, grad)


_gated_skip_op = custom_op("kalmix::gated_skip", with_launch_cache(_forward), _forward_fake)
_gated_skip_backward = without_dispatcher(
    custom_op("kalmix::gated_skip_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if grad is None else _gated_skip_backward(*ctx.saved_tensors, grad)


def _differentiable_gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(differentiate(_eager, ctx.saved_tensors, [grad]))


_gated_skip = register_gradients(_gated_skip_op, _setup, _gradients, _differentiable_gradients)
