"""Decay and process noise of cells from learned logarithms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import uses_triton
from kalmix.layers.fused.positive import positive
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher


def cell_dynamics(
    log_rate: Tensor, log_step: Tensor, log_diffusion: Tensor | None, zero_order_hold: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log_decay = -a s and process_noise = c (1 - exp(-2 a s)) / (2 a); with a zero-order hold, c s.

    Args:
        log_rate: logarithm of the rate a; see `positive`.
        log_step: logarithm of the step s, in the shape and dtype of `log_rate`.
        log_diffusion: logarithm of the diffusion c; `None` for 0.
        zero_order_hold: return the process noise c s instead of the exact one.

    Returns:
        Two tensors in the shape and dtype of the inputs.

    Complexity: O(1) per element. Training stores the inputs.

    Example:
        >>> from kalmix.layers.fused import cell_dynamics
        >>> cell_dynamics(torch.zeros(1), torch.zeros(1), torch.zeros(1))
        (tensor([-1.]), tensor([0.4323]))
    """
    if log_rate.dtype == torch.float32 and uses_triton("cell_dynamics", log_rate):
        return _cell_dynamics(log_rate, log_step, log_diffusion, zero_order_hold)
    return _eager(log_rate, log_step, log_diffusion, zero_order_hold)


def discretize_ou(rate: Tensor, diffusion: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Discretise the Ornstein-Uhlenbeck process dz = -rate z dt + c dW exactly (Kalman Linear Attention, equation 8).

    Args:
        rate: alpha > 0, mean reversion per unit of time.
        diffusion: c^2 >= 0, variance per unit of time.
        step: dt > 0, time between tokens.

    Returns:
        log_decay = -alpha dt, and process_noise = c^2 (1 - exp(-2 alpha dt)) / (2 alpha).
    """
    return -rate * step, diffusion * (-torch.expm1(-2 * rate * step) / (2 * rate))


def discretize_zoh(rate: Tensor, diffusion: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Discretise with a zero-order hold: the same decay, but noise c^2 dt (the paper's ablation, Figure 3b)."""
    return -rate * step, diffusion * step


def _eager(
    log_rate: Tensor, log_step: Tensor, log_diffusion: Tensor | None, zero_order_hold: bool
) -> tuple[Tensor, Tensor]:
    rate, step = positive(log_rate), positive(log_step)
    if log_diffusion is None:
        return -rate * step, torch.zeros_like(rate)
    return (discretize_zoh if zero_order_hold else discretize_ou)(rate, positive(log_diffusion), step)


def _forward_fake(log_rate, log_step, log_diffusion, zero_order_hold):
    return log_rate.new_empty(log_rate.shape), log_rate.new_empty(log_rate.shape)


def _forward(
    log_rate: Tensor, log_step: Tensor, log_diffusion: Tensor | None, zero_order_hold: bool
) -> tuple[Tensor, Tensor]:
    from kalmix.layers.fused.triton.cell_dynamics import forward

    return forward(log_rate, log_step, log_diffusion, zero_order_hold)


def _backward_fake(log_rate, log_step, log_diffusion, log_decay_grad, process_noise_grad, zero_order_hold):
    diffusion = log_rate.new_empty(0 if log_diffusion is None else log_rate.shape)
    return log_rate.new_empty(log_rate.shape), log_rate.new_empty(log_rate.shape), diffusion


def _backward(
    log_rate: Tensor,
    log_step: Tensor,
    log_diffusion: Tensor | None,
    log_decay_grad: Tensor | None,
    process_noise_grad: Tensor | None,
    zero_order_hold: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from kalmix.layers.fused.triton.cell_dynamics import backward

    return backward(log_rate, log_step, log_diffusion, log_decay_grad, process_noise_grad, zero_order_hold)


_cell_dynamics_op = custom_op("kalmix::cell_dynamics", with_launch_cache(_forward), _forward_fake)
_cell_dynamics_backward = without_dispatcher(
    custom_op("kalmix::cell_dynamics_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.zero_order_hold = inputs[3]


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if all(grad is None for grad in grads):
        return (None,) * 4
    saved = ctx.saved_tensors  # gradient checkpointing allows only one access
    rate, step, diffusion = _cell_dynamics_backward(*saved, *grads, ctx.zero_order_hold)
    return rate, step, None if saved[2] is None else diffusion, None


def _differentiable_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    def function(log_rate: Tensor, log_step: Tensor, log_diffusion: Tensor | None) -> tuple[Tensor, Tensor]:
        return _eager(log_rate, log_step, log_diffusion, ctx.zero_order_hold)

    return *differentiate(function, ctx.saved_tensors, grads), None


_cell_dynamics = register_gradients(_cell_dynamics_op, _setup, _gradients, _differentiable_gradients)
