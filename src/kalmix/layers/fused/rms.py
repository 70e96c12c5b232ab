"""RMS norm with an optional gate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.layers.fused.activations import ACTIVATIONS
from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import output_dtype, uses_triton
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher


class Gate(NamedTuple):
    """Gate of a norm's output.

    Attributes:
        input: its tensor before the activation, in the shape of the norm's input (or a shape that broadcasts to it).
        activation: "silu" or "sigmoid".
        first: whether to multiply before the norm instead of after it.
    """

    input: Tensor
    activation: str = "silu"
    first: bool = False

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x` times the activated gate."""
        return x * ACTIVATIONS[self.activation](self.input)


class Norm(NamedTuple):
    """Constants of a norm: the number of columns normalised together, and the number added to their mean square."""

    width: int
    eps: float


def rms_norm(x: Tensor, weight: Tensor, norm: Norm, gate: Gate | None = None) -> Tensor:
    """Divide groups of columns by their root mean square; multiply by a weight and, if given, by a gate.

        y = weight n(x) act(gate),   or with a gate that comes first   y = weight n(x act(gate)),
        n(x) = x / sqrt(mean(x^2) + eps)

    The Triton form computes in float32 and rounds once. With a gate it runs under `torch.compile`, too.

    Args:
        x: `[..., E]`.
        weight: `[width]`, shared by all groups, or `[E]`.
        norm: `width`, a divisor of E, and `eps`.
        gate: the gate, or `None`.

    Returns:
        `[..., E]`, in the dtype of `x` and the gate, or in autocast's.

    Complexity: O(1) per element. Training stores x, the gate's input and the weight.

    Example:
        >>> from kalmix.layers.fused import Gate, Norm, rms_norm
        >>> x = torch.tensor([3.0, 4.0, 5.0, 12.0])
        >>> rms_norm(x, torch.ones(2), Norm(width=2, eps=0.0))
        tensor([0.8485, 1.1314, 0.5439, 1.3054])
        >>> rms_norm(x, torch.ones(2), Norm(width=2, eps=0.0), Gate(torch.zeros(4), "sigmoid"))
        tensor([0.4243, 0.5657, 0.2720, 0.6527])
    """
    dtype = output_dtype(x.device, x.dtype if gate is None else torch.promote_types(x.dtype, gate.input.dtype))
    fits = gate is None or gate.input.shape == x.shape
    if fits and uses_triton("rms_norm" if gate is None else "gated_rms_norm", x, norm.width):
        gate_arguments = (None, "none", False) if gate is None else gate
        return _rms_norm(x, gate_arguments[0], weight, *norm, *gate_arguments[1:], dtype)
    return eager_rms_norm(x, weight, norm, gate).to(dtype)


def eager_rms_norm(x: Tensor, weight: Tensor, norm: Norm, gate: Gate | None = None) -> Tensor:
    """Compute `rms_norm` with PyTorch, in the wider dtype of `x` and the gate."""
    x = gate.multiply(x) if gate is not None and gate.first else x
    weight = weight.to(x.dtype)
    if norm.width == x.shape[-1]:
        y = F.rms_norm(x, (norm.width,), weight, norm.eps)
    else:
        groups, shared = x.unflatten(-1, (-1, norm.width)), weight.shape[0] == norm.width
        y = F.rms_norm(groups, (norm.width,), weight if shared else None, norm.eps).flatten(-2)
        y = y if shared else y * weight
    return gate.multiply(y) if gate is not None and not gate.first else y


def _forward_fake(x, gate, weight, width, eps, activation, gate_first, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    width: int,
    eps: float,
    activation: str,
    gate_first: bool,
    dtype: torch.dtype,
) -> Tensor:
    from kalmix.layers.fused.triton.rms import NormOptions, forward

    return forward(x, gate, weight, NormOptions(width, eps, activation, gate_first), dtype)[0]


def _backward_fake(x, gate, weight, grad, width, eps, activation, gate_first):
    gate_grad = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), gate_grad, weight.new_empty(weight.shape)


def _backward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    grad: Tensor,
    width: int,
    eps: float,
    activation: str,
    gate_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from kalmix.layers.fused.triton.rms import NormOptions, backward

    return backward(x, gate, weight, grad, NormOptions(width, eps, activation, gate_first))


_rms_norm_op = custom_op("kalmix::rms_norm", with_launch_cache(_forward), _forward_fake)
_rms_norm_backward = without_dispatcher(
    custom_op("kalmix::rms_norm_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options, ctx.dtype = inputs[3:7], inputs[7]


def _gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    x, gate, weight = ctx.saved_tensors  # gradient checkpointing allows only one access
    dx, dgate, dweight = _rms_norm_backward(x, gate, weight, grad, *ctx.options)
    return dx, None if gate is None else dgate, dweight, *[None] * 5


def _differentiable_gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    width, eps, *gate_options = ctx.options

    def function(x: Tensor, gate: Tensor | None, weight: Tensor) -> tuple[Tensor]:
        given = None if gate is None else Gate(gate, *gate_options)
        return (eager_rms_norm(x, weight, Norm(width, eps), given).to(ctx.dtype),)

    return *differentiate(function, ctx.saved_tensors, [grad]), *[None] * 5


_rms_norm = register_gradients(_rms_norm_op, _setup, _gradients, _differentiable_gradients)
