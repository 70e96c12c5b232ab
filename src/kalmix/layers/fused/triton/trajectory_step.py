"""Parts around the step of `attend`: one program computes the parameters of a head, or predicts a state."""

from __future__ import annotations

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
def _positive(raw, KNEE: tl.constexpr):
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
def parameters_kernel(
    log_rate, log_step, process_noise, key_noise, query_noise, frequency, log_nu, log_temperature, floor,
    process_floor, key_floor, query_floor, result, heads,
    C: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTS: tl.constexpr, FLOOR: tl.constexpr,
    KNEE: tl.constexpr,
):  # fmt: skip
    """Compute the parameters of a head."""
    head = tl.program_id(0)
    at = result + head
    step = _positive(_load(log_step, head), KNEE)
    tl.store(at, -_positive(_load(log_rate, head), KNEE) * step)
    tl.store(at + heads, (_softplus(_load(process_noise, head)) + process_floor) * step)
    tl.store(at + 2 * heads, _softplus(_load(key_noise, head)) + key_floor)
    tl.store(at + 3 * heads, _softplus(_load(query_noise, head)) + query_floor)
    if WEIGHTS:
        tl.store(at + 4 * heads, _positive(_load(log_nu, head), KNEE))
        tl.store(at + 5 * heads, _positive(_load(log_temperature, head), KNEE))
        value = tl.zeros([], tl.float32)
        if FLOOR:
            value = _softplus(_load(floor, head))
        tl.store(at + 6 * heads, value)
    channel = tl.arange(0, CHANNELS)
    half = tl.load(frequency + head * PAIRS + channel % PAIRS, mask=channel < C, other=0.0).to(tl.float32)
    turn = tl.where(channel < PAIRS, half, -half) * step
    tl.store(result + 7 * heads + head * C + channel, turn, mask=channel < C)


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


def parameters(arguments: tuple[Any, ...]) -> Tensor:
    """Return `[7, H]` parameters of heads, then frequencies `[H, C]`, in one contiguous tensor.

    Args:
        arguments: nine raw parameters, of which the last three may be `None`; floors of three variances; and C.
    """
    raw, floors, channels = arguments[:9], arguments[9:12], arguments[12]
    heads, pairs = raw[5].shape
    result = torch.empty(heads * (7 + channels), dtype=torch.float32, device=raw[0].device)
    Launch(parameters_kernel, (heads,), (*(raw[0] if x is None else x for x in raw), *floors, result, heads), {
        "C": channels, "PAIRS": pairs, "CHANNELS": triton.next_power_of_2(channels),
        "WEIGHTS": raw[6] is not None, "FLOOR": raw[8] is not None, "KNEE": KNEE, "num_warps": 1,
    }).run()  # fmt: skip
    return result


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
