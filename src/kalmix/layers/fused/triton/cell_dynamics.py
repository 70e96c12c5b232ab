"""Decay and process noise of cells: one program computes a block of cells."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.dispatch import KNEE
from kalmix.ops._shared.triton.compile_and_launch import Launch

BLOCK, WARPS = 256, 4  # cells and warps of a program


@triton.jit
def _positive(x, at, mask, KNEE: tl.constexpr):
    """Load x; return y = `positive`(x), and the derivative of log(y) by x."""
    raw = tl.load(x + at, mask=mask, other=0.0)
    size = tl.abs(raw)
    slow = KNEE * (1.0 + tl.log(tl.where(size <= KNEE, 1.0, size / KNEE)))
    slow = tl.where(raw != raw, raw, tl.where(raw < 0.0, -slow, slow))  # NaN stays NaN
    slope = tl.where(size <= KNEE, 1.0, KNEE / tl.where(size <= KNEE, 1.0, size))
    return tl.exp(tl.where(size <= KNEE, raw, slow)), slope


@triton.jit
def _complement(u):
    """Return 1 - exp(-u) for u >= 0, without cancellation."""
    y = tl.exp(-u)
    near = tl.where((y == 1.0) | (y < 0.5), 0.5, y)
    # the quotient cancels the rounding of y
    value = (1.0 - near) * (u / -tl.log(near))
    return tl.where(y == 1.0, u, tl.where(y < 0.5, 1.0 - y, tl.where(u != u, u, value)))


@triton.jit(do_not_specialize=["count"])
def cell_dynamics_forward(
    log_rate, log_step, log_diffusion, log_decay, noise, count,
    DIFFUSES: tl.constexpr, HOLD: tl.constexpr, KNEE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute decays and process noises of a block of cells."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    rate, _ = _positive(log_rate, at, mask, KNEE)
    step, _ = _positive(log_step, at, mask, KNEE)
    tl.store(log_decay + at, -rate * step, mask=mask)
    variance = tl.zeros((BLOCK,), tl.float32)
    if DIFFUSES:
        diffusion, _ = _positive(log_diffusion, at, mask, KNEE)
        variance = diffusion * step
        if not HOLD:
            variance = diffusion * (_complement(2.0 * rate * step) / (2.0 * rate))
    tl.store(noise + at, variance, mask=mask)


@triton.jit(do_not_specialize=["count"])
def cell_dynamics_backward(
    log_rate, log_step, log_diffusion, ddecay, dnoise, drate, dstep, ddiffusion, count,
    DIFFUSES: tl.constexpr, HOLD: tl.constexpr, DECAY_GRAD: tl.constexpr, NOISE_GRAD: tl.constexpr,
    KNEE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the logarithms of a block of cells."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    rate, rate_slope = _positive(log_rate, at, mask, KNEE)
    step, step_slope = _positive(log_step, at, mask, KNEE)
    rate_grad, step_grad = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)  # of logarithms
    if DECAY_GRAD:
        rate_grad += -rate * step * tl.load(ddecay + at, mask=mask, other=0.0)
        step_grad += rate_grad
    if DIFFUSES:
        diffusion, diffusion_slope = _positive(log_diffusion, at, mask, KNEE)
        diffusion_grad = tl.zeros((BLOCK,), tl.float32)
        if NOISE_GRAD:
            grad = tl.load(dnoise + at, mask=mask, other=0.0)
            if HOLD:
                diffusion_grad = grad * diffusion * step
                step_grad += diffusion_grad
            else:
                u = 2.0 * rate * step
                rest, complement, scale = tl.exp(-u), _complement(u), grad * diffusion / (2.0 * rate)
                # u exp(-u) - (1 - exp(-u)); a series where the difference cancels
                series = 1.0 / 30.0 - u * (1.0 / 144.0 - u * (1.0 / 840.0 - u / 5760.0))
                series = -u * u * (0.5 - u * (1.0 / 3.0 - u * (0.125 - u * series)))
                diffusion_grad = scale * complement
                step_grad += scale * u * rest
                rate_grad += scale * tl.where(u < 0.3, series, tl.where(rest == 0.0, 0.0, u * rest) - complement)
        tl.store(ddiffusion + at, diffusion_grad * diffusion_slope, mask=mask)
    tl.store(drate + at, rate_grad * rate_slope, mask=mask)
    tl.store(dstep + at, step_grad * step_slope, mask=mask)


def forward(
    log_rate: Tensor, log_step: Tensor, log_diffusion: Tensor | None, zero_order_hold: bool
) -> tuple[Tensor, Tensor]:
    """Return log-decay and process noise, contiguous."""
    log_decay, noise = log_rate.new_empty(log_rate.shape), log_rate.new_empty(log_rate.shape)
    inputs = _inputs(log_rate, log_step, log_diffusion)
    options = _options(log_diffusion, zero_order_hold)
    count = log_rate.numel()
    Launch(cell_dynamics_forward, (-(-count // BLOCK),), (*inputs, log_decay, noise, count), options).run()
    return log_decay, noise


def backward(
    log_rate: Tensor,
    log_step: Tensor,
    log_diffusion: Tensor | None,
    log_decay_grad: Tensor | None,
    process_noise_grad: Tensor | None,
    zero_order_hold: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs; empty for an absent diffusion."""
    rate, step = log_rate.new_empty(log_rate.shape), log_rate.new_empty(log_rate.shape)
    diffusion = log_rate.new_empty(0 if log_diffusion is None else log_rate.shape)
    inputs = _inputs(log_rate, log_step, log_diffusion)
    grads = [rate if x is None else x.contiguous() for x in (log_decay_grad, process_noise_grad)]
    options = _options(log_diffusion, zero_order_hold)
    options |= {"DECAY_GRAD": log_decay_grad is not None, "NOISE_GRAD": process_noise_grad is not None}
    count = log_rate.numel()
    arguments = (*inputs, *grads, rate, step, diffusion, count)
    Launch(cell_dynamics_backward, (-(-count // BLOCK),), arguments, options).run()
    return rate, step, diffusion


def _inputs(log_rate: Tensor, log_step: Tensor, log_diffusion: Tensor | None) -> list[Tensor]:
    return [x.contiguous() for x in (log_rate, log_step, log_rate if log_diffusion is None else log_diffusion)]


def _options(log_diffusion: Tensor | None, zero_order_hold: bool) -> dict[str, Any]:
    options = {"DIFFUSES": log_diffusion is not None, "HOLD": zero_order_hold}
    return options | {"KNEE": KNEE, "BLOCK": BLOCK, "num_warps": WARPS}
