"""Log-decay of a step that depends on the token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import uses_triton
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher
from kalmix.types import belief_dtype


def step_decay(raw: Tensor, bias: Tensor, log_rate: Tensor) -> Tensor:
    """Return -rate softplus(raw + bias) in the dtype of beliefs, where rate = exp(log_rate).

    Args:
        raw: `[..., C]`. May be a view of a wider tensor.
        bias: `[C]`.
        log_rate: `[G]` for a divisor G of C; each serves C / G adjacent columns.

    Returns:
        `[..., C]` in float32, or in float64 if `raw` is float64.

    Complexity: O(1) per element. Training stores the inputs.

    Example:
        >>> from kalmix.layers.fused import step_decay
        >>> step_decay(torch.tensor([0.0, 100.0]), torch.zeros(2), torch.zeros(1))
        tensor([  -0.6931, -100.0000])
    """
    if uses_triton("step_decay", raw) and bias.dtype != torch.float64 != log_rate.dtype:
        return _step_decay(raw, bias, log_rate)
    return _eager(raw, bias, log_rate)[0]


def _eager(raw: Tensor, bias: Tensor, log_rate: Tensor) -> tuple[Tensor]:
    dtype = belief_dtype(raw.dtype)
    step = F.softplus(raw.to(dtype) + bias.to(dtype)).unflatten(-1, (log_rate.shape[0], -1))
    return ((-log_rate.to(dtype).exp()[:, None] * step).flatten(-2),)


def _forward_fake(raw, bias, log_rate):
    return raw.new_empty(raw.shape, dtype=torch.float32)


def _forward(raw: Tensor, bias: Tensor, log_rate: Tensor) -> Tensor:
    from kalmix.layers.fused.triton.step_decay import forward

    return forward(raw, bias, log_rate)


def _backward_fake(raw, bias, log_rate, grad):
    return tuple(x.new_empty(x.shape) for x in (raw, bias, log_rate))


def _backward(raw: Tensor, bias: Tensor, log_rate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from kalmix.layers.fused.triton.step_decay import backward

    return backward(raw, bias, log_rate, grad)


_step_decay_op = custom_op("kalmix::step_decay", with_launch_cache(_forward), _forward_fake)
_step_decay_backward = without_dispatcher(
    custom_op("kalmix::step_decay_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None,) * 3 if grad is None else _step_decay_backward(*ctx.saved_tensors, grad)


def _differentiable_gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(differentiate(_eager, ctx.saved_tensors, [grad]))


_step_decay = register_gradients(_step_decay_op, _setup, _gradients, _differentiable_gradients)
