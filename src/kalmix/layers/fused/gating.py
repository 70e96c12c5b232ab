"""Product of two halves of a projection, of which one is activated; in decoding, one kernel also projects."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import HALF, STEP_ROWS, uses_triton
from kalmix.ops._shared.custom_op import custom_op, needs_grad, with_launch_cache, without_dispatcher


def swiglu(x: Tensor) -> Tensor:
    """Compute silu(a) b for the halves a and b of the columns of `x`.

    Args:
        x: `[..., 2 F]`: F columns of the gate a, then F columns of the value b.

    Returns:
        `[..., F]` in the dtype of `x`.

    Complexity: O(1) per element. Training stores `x`.

    Example:
        >>> from kalmix.layers.fused import swiglu
        >>> swiglu(torch.tensor([0.0, 100.0, 3.0, 4.0])).tolist()
        [0.0, 400.0]
    """
    return _swiglu(x) if uses_triton("swiglu", x) else _eager(x)[0]


def can_fuse_swiglu(x: Tensor, weight: Tensor) -> bool:
    """Return whether `swiglu_linear` accepts these arguments: half precision, few tokens, and no gradients."""
    return (
        uses_triton("swiglu_linear", x)
        and x.dtype in HALF
        and weight.dtype == x.dtype
        and x.numel() <= STEP_ROWS * x.shape[-1]
        and type(weight) in (Tensor, nn.Parameter)  # no subclasses, such as quantized or sharded tensors
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
        and not needs_grad(x, weight)
    )


def swiglu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `swiglu(x weight')` in one kernel, for the few tokens of a decoding step; see `can_fuse_swiglu`.

    The projection is rounded to the dtype of `x` before the activation, as a linear layer rounds it.

    Args:
        x: `[..., D]`.
        weight: `[2 F, D]`: F rows of the gate, then F rows of the value.

    Returns:
        `[..., F]` in the dtype of `x`.

    Complexity: O(D) per element.
    """
    return _swiglu_linear(x, weight)


@with_launch_cache
def _swiglu_linear(x: Tensor, weight: Tensor) -> Tensor:
    from kalmix.layers.fused.triton.gating import project

    return project(x, weight)


def _eager(x: Tensor) -> tuple[Tensor]:
    gate, value = x.chunk(2, dim=-1)
    return (F.silu(gate) * value,)


def _forward_fake(x):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _forward(x: Tensor) -> Tensor:
    from kalmix.layers.fused.triton.gating import forward

    return forward(x)


def _backward_fake(x, grad):
    return x.new_empty(x.shape)


def _backward(x: Tensor, grad: Tensor) -> Tensor:
    from kalmix.layers.fused.triton.gating import backward

    return backward(x, grad)


_swiglu_op = custom_op("kalmix::swiglu", with_launch_cache(_forward), _forward_fake)
_swiglu_backward = without_dispatcher(
    custom_op("kalmix::swiglu_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else _swiglu_backward(*ctx.saved_tensors, grad)


def _differentiable_gradients(ctx: Any, grad: Tensor | None) -> Tensor | None:
    return differentiate(_eager, ctx.saved_tensors, [grad])[0]


_swiglu = register_gradients(_swiglu_op, _setup, _gradients, _differentiable_gradients)
