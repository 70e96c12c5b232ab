"""Parts around the step of `attend`: one program computes the parameters of a head, or predicts a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.dispatch import KNEE
from kalmix.ops._shared.triton.compile_and_launch import Launch

TURN = tl.constexpr(6.283185307179586)


@triton.jit
def _load(parameters, head):
    """Load the parameter of a head."""
    return tl.load(parameters + head).to(tl.float32)


@triton.jit
def positive_value(raw, KNEE: tl.constexpr):
    """Return the positive number of a logarithm; see `positive`."""
    size = tl.abs(raw)
    slow = KNEE * (1.0 + tl.log(tl.maximum(size, KNEE) / KNEE))
    slow = tl.where(raw != raw, raw, tl.where(raw < 0.0, -slow, slow))  # NaN stays NaN
    return tl.exp(tl.where(size <= KNEE, raw, slow))


@triton.jit
def _softplus(raw):
    """Compute log(1 + exp(raw)) without cancellation."""
    small = tl.exp(-tl.abs(raw))
    above = 1.0 + small
    # log(1 + small): the quotient cancels the rounding of `above`
    logarithm = tl.where(above == 1.0, small, small * (tl.log(above) / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(raw < 0.0, 0.0, raw) + logarithm


@triton.jit
def _slope(raw, KNEE: tl.constexpr):
    """Return the derivative of the logarithm of `positive_value`."""
    size = tl.abs(raw)
    return tl.where(size <= KNEE, 1.0, KNEE / tl.where(size <= KNEE, 1.0, size))


@triton.jit
def parameters_kernel(
    log_rate, log_step, process_noise, key_noise, query_noise, frequency, log_nu, log_temperature, floor,
    process_floor, key_floor, query_floor,
    decay_out, frequency_out, process_out, key_out, query_out, nu_out, temperature_out, floor_out,
    C: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTS: tl.constexpr, FLOOR: tl.constexpr,
    KNEE: tl.constexpr,
):  # fmt: skip
    """Compute the parameters of a head."""
    head = tl.program_id(0)
    step = positive_value(_load(log_step, head), KNEE)
    tl.store(decay_out + head, -positive_value(_load(log_rate, head), KNEE) * step)
    tl.store(process_out + head, (_softplus(_load(process_noise, head)) + process_floor) * step)
    tl.store(key_out + head, _softplus(_load(key_noise, head)) + key_floor)
    tl.store(query_out + head, _softplus(_load(query_noise, head)) + query_floor)
    if WEIGHTS:
        tl.store(nu_out + head, positive_value(_load(log_nu, head), KNEE))
        tl.store(temperature_out + head, positive_value(_load(log_temperature, head), KNEE))
        value = tl.zeros([], tl.float32)
        if FLOOR:
            value = _softplus(_load(floor, head))
        tl.store(floor_out + head, value)
    channel = tl.arange(0, CHANNELS)
    half = tl.load(frequency + head * PAIRS + channel % PAIRS, mask=channel < C, other=0.0).to(tl.float32)
    turn = tl.where(channel < PAIRS, half, -half) * step
    tl.store(frequency_out + head * C + channel, turn, mask=channel < C)


@triton.jit
def _store_grad(grad, head, value):
    """Store the gradient of the parameter of a head."""
    tl.store(grad + head, value.to(grad.dtype.element_ty))


@triton.jit
def parameters_backward_kernel(
    log_rate, log_step, process_noise, key_noise, query_noise, frequency, log_nu, log_temperature, floor,
    process_floor,
    decay_grad, frequency_grad, process_grad, key_grad, query_grad, nu_grad, temperature_grad, floor_grad,
    d_rate, d_step, d_process, d_key, d_query, d_frequency, d_nu, d_temperature, d_floor,
    C: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTS: tl.constexpr, FLOOR: tl.constexpr,
    GRADS: tl.constexpr, KNEE: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the learned parameters of a head; bit i of `GRADS` says whether output i has a gradient."""
    head, zero = tl.program_id(0), tl.zeros([], tl.float32)
    raw_step, raw_rate, raw_process = _load(log_step, head), _load(log_rate, head), _load(process_noise, head)
    step, rate = positive_value(raw_step, KNEE), positive_value(raw_rate, KNEE)
    decay = _load(decay_grad, head) if GRADS & 1 else zero
    process = _load(process_grad, head) if GRADS & 4 else zero
    key = _load(key_grad, head) if GRADS & 8 else zero
    query = _load(query_grad, head) if GRADS & 16 else zero
    _store_grad(d_rate, head, -decay * step * rate * _slope(raw_rate, KNEE))
    _store_grad(d_process, head, process * step * tl.sigmoid(raw_process))
    _store_grad(d_key, head, key * tl.sigmoid(_load(key_noise, head)))
    _store_grad(d_query, head, query * tl.sigmoid(_load(query_noise, head)))
    collected = process * (_softplus(raw_process) + process_floor) - decay * rate
    pair = tl.arange(0, CHANNELS)
    turn = tl.zeros([CHANNELS], tl.float32)
    if GRADS & 2:
        turn += tl.load(frequency_grad + head * C + pair, mask=pair < PAIRS, other=0.0)
        turn -= tl.load(frequency_grad + head * C + PAIRS + pair, mask=pair < C - PAIRS, other=0.0)
    half = tl.load(frequency + head * PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    collected += tl.sum(half * turn, axis=0)
    tl.store(d_frequency + head * PAIRS + pair, (turn * step).to(d_frequency.dtype.element_ty), mask=pair < PAIRS)
    _store_grad(d_step, head, collected * step * _slope(raw_step, KNEE))
    if WEIGHTS:
        raw_nu, raw_temperature = _load(log_nu, head), _load(log_temperature, head)
        nu = _load(nu_grad, head) if GRADS & 32 else zero
        temperature = _load(temperature_grad, head) if GRADS & 64 else zero
        _store_grad(d_nu, head, nu * positive_value(raw_nu, KNEE) * _slope(raw_nu, KNEE))
        _store_grad(
            d_temperature, head, temperature * positive_value(raw_temperature, KNEE) * _slope(raw_temperature, KNEE)
        )
    if FLOOR:
        least = _load(floor_grad, head) if GRADS & 128 else zero
        _store_grad(d_floor, head, least * tl.sigmoid(_load(floor, head)))


@triton.jit
def predict_kernel(
    estimate, v, residual, log_decay, frequency, result, estimate_row, estimate_head, v_row, v_head, heads,
    C: tl.constexpr, CHANNELS: tl.constexpr, PREDICTS: tl.constexpr,
):  # fmt: skip
    """Mix the estimate of a head with its value, and predict the state."""
    row, head, channel = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, CHANNELS)
    inside = channel < C
    share = tl.sigmoid(_load(residual, head))
    estimate += row * estimate_row + head * estimate_head + channel
    v += row * v_row + head * v_head + channel
    own_re = tl.load(v, mask=inside, other=0.0).to(tl.float32)
    own_im = tl.load(v + C, mask=inside, other=0.0).to(tl.float32)
    real = (1.0 - share) * own_re + share * tl.load(estimate, mask=inside, other=0.0).to(tl.float32)
    imaginary = (1.0 - share) * own_im + share * tl.load(estimate + C, mask=inside, other=0.0).to(tl.float32)
    if PREDICTS:
        decay = tl.exp(tl.load(log_decay + head))
        angle = tl.load(frequency + head * C + channel, mask=inside, other=0.0).to(tl.float64)
        angle = (angle - TURN * tl.floor(angle / TURN + 0.5)).to(tl.float32)
        cos, sin = decay * tl.cos(angle), decay * tl.sin(angle)
        turned = real * cos - imaginary * sin
        imaginary = real * sin + imaginary * cos
        real = turned
    at = result + (row * heads + head) * 2 * C + channel
    tl.store(at, real.to(result.dtype.element_ty), mask=inside)
    tl.store(at + C, imaginary.to(result.dtype.element_ty), mask=inside)


def parameters(raw: Sequence[Tensor | None], floors: tuple[float, float, float], channels: int) -> list[Tensor]:
    """Return log-decays, frequencies, three variances, and the parameters of weights (empty without weights).

    Args:
        raw: nine learned parameters, of which the last three may be `None`.
        floors: floors of three variances.
        channels: C.
    """
    first, frequency = raw[0], raw[5]
    assert first is not None and frequency is not None
    heads = first.shape[0]
    sizes = [(heads,), (heads, channels), *[(heads,)] * 3, *[(heads if raw[6] is not None else 0,)] * 3]
    results = [torch.empty(size, dtype=torch.float32, device=first.device) for size in sizes]
    inputs = (first if x is None else x.contiguous() for x in raw)
    Launch(parameters_kernel, (heads,), (*inputs, *floors, *results), _constants(raw, channels)).run()
    return results


def parameters_backward(
    raw: Sequence[Tensor | None], grads: Sequence[Tensor | None], process_floor: float, channels: int
) -> list[Tensor]:
    """Return gradients of the learned parameters, empty for missing ones; `grads` are those of `parameters`."""
    first = raw[0]
    assert first is not None
    results = [first.new_empty(0) if x is None else x.new_empty(x.shape) for x in raw]
    inputs = (first if x is None else x.contiguous() for x in raw)
    upstream = (first if x is None else x.contiguous() for x in grads)
    constants = _constants(raw, channels) | {"GRADS": sum(1 << i for i, x in enumerate(grads) if x is not None)}
    arguments = (*inputs, process_floor, *upstream, *results)
    Launch(parameters_backward_kernel, (first.shape[0],), arguments, constants).run()
    return results


def _constants(raw: Sequence[Tensor | None], channels: int) -> dict[str, Any]:
    frequency = raw[5]
    assert frequency is not None
    return {
        "C": channels, "PAIRS": frequency.shape[1], "CHANNELS": triton.next_power_of_2(channels),
        "WEIGHTS": raw[6] is not None, "FLOOR": raw[8] is not None, "KNEE": KNEE, "num_warps": 1,
    }  # fmt: skip


def predict(
    estimate: Tensor, v: Tensor, residual: Tensor, log_decay: Tensor | None, frequency: Tensor | None
) -> Tensor:
    """Return the predicted states in the dtype of `v`, contiguous."""
    estimate, v = (x if x.stride(3) == 1 else x.contiguous() for x in (estimate, v))
    (batch, _, heads, width), result = v.shape, torch.empty(v.shape, dtype=v.dtype, device=v.device)
    Launch(predict_kernel, (batch, heads), (
        estimate, v, residual, residual if log_decay is None else log_decay,
        residual if frequency is None else frequency, result,
        *(x.stride(i) for x in (estimate, v) for i in (0, 2)), heads,
    ), {
        "C": width // 2, "CHANNELS": triton.next_power_of_2(width // 2), "PREDICTS": log_decay is not None,
        "num_warps": 1,
    }).run()  # fmt: skip
    return result
