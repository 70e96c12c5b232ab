"""Robust Kalman filter with a state of constant size (`recurrent-afa`): one program per sequence and head.

A program processes its sequence token by token, forward or backward. Tokens are loaded two steps ahead, because the
steps themselves are short. The forward pass stores the state after each token for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.kappa import LOG2E, kappa
from kalmix.ops._shared.triton.ptx import log2, reciprocal, supports_ptx
from kalmix.ops._shared.triton.tiles import contiguous_rows

SIZES = ["tokens", "H"]  # integer arguments whose values do not trigger recompilation


@triton.jit
def locate(rows, tokens, PACKED: tl.constexpr):
    """Return the first token of the sequence of a program, in the flattened batch, and its number of tokens."""
    sequence = tl.program_id(0).to(tl.int64)
    first, count = sequence * tokens, tokens
    if PACKED:
        start = tl.load(rows + 3 * sequence + 1)
        first = tl.load(rows + 3 * sequence).to(tl.int64) * tokens + start
        count = tl.load(rows + 3 * sequence + 2) - start
    return sequence, first, count


@triton.jit
def load_pair(x, C, inside):
    """Load real and imaginary parts of one row as float32."""
    return tl.load(x, mask=inside, other=0.0).to(tl.float32), tl.load(x + C, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_filter_params(head_params, head, H):
    """Load rate, process noise, observation noise, 1 / nu, temperature and the logit of the step."""
    at = head_params + head
    return (
        tl.load(at), tl.load(at + H), tl.load(at + 2 * H), 1.0 / tl.load(at + 3 * H), tl.load(at + 4 * H),
        tl.sigmoid(tl.load(at + 5 * H)),
    )  # fmt: skip


@triton.jit
def transition(rate, process, frequency, lag, PTX: tl.constexpr):
    """Return decay, cosine and sine of the angles, and accumulated noise over a lag."""
    decay = tl.exp2(-LOG2E * rate * lag)
    angle = frequency * lag
    return decay, decay * tl.cos(angle), decay * tl.sin(angle), process * kappa(rate, lag, decay)


@triton.jit
def token_lag(times, token, previous, is_observed):
    """Return the time of a token and its lag."""
    now = tl.load(times + token)
    return now, tl.where(is_observed, tl.maximum(now - previous, 0.0), 0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def filter_kernel(
    q, k, v, q_token, q_head, k_token, k_head, v_token, v_head, prior_mean, prior_precision, prior_time, head_params,
    frequency, times, rows, means, variances, states, precisions, weights, final_mean, final_precision, final_time,
    tokens, H,
    C: tl.constexpr, P: tl.constexpr, ITERATIONS: tl.constexpr, TIMED: tl.constexpr, PACKED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Filter one sequence of one head; see `kalmix.layers.RecurrentFilterAttention` for the equations."""
    sequence, first, count = locate(rows, tokens, PACKED)
    head, channel = tl.program_id(1), tl.arange(0, P)
    inside = channel < C
    rate, process, noise, inverse_nu, temperature, step_size = load_filter_params(head_params, head, H)
    omega = tl.load(frequency + head * C + channel, mask=inside, other=0.0)
    state = sequence * 2 * H + head
    key_re, key_im = load_pair(prior_mean + state * 2 * C + channel, C, inside)
    value_re, value_im = load_pair(prior_mean + (state + H) * 2 * C + channel, C, inside)
    precision = tl.load(prior_precision + sequence * H + head)
    is_old = tl.load(prior_precision + sequence * H) > 0
    time = tl.load(prior_time + sequence)
    decay, cosine, sine, grown = transition(rate, process, omega, 1.0, PTX)
    q_token, k_token, v_token = tl.cast(q_token, tl.int64), tl.cast(k_token, tl.int64), tl.cast(v_token, tl.int64)
    q += first * q_token + head * q_head + channel
    k += first * k_token + head * k_head + channel
    v += first * v_token + head * v_head + channel
    ahead = inside & (count > 1)
    query = load_pair(q, C, inside & (count > 0))
    key = load_pair(k, C, inside & (count > 0))
    value = load_pair(v, C, inside & (count > 0))
    query_1, key_1, value_1 = (
        load_pair(q + q_token, C, ahead),
        load_pair(k + k_token, C, ahead),
        load_pair(v + v_token, C, ahead),
    )
    q_re, q_im, k_re, k_im, v_re, v_im = query[0], query[1], key[0], key[1], value[0], value[1]
    q1_re, q1_im, k1_re, k1_im, v1_re, v1_im = query_1[0], query_1[1], key_1[0], key_1[1], value_1[0], value_1[1]
    for t in range(count):
        later = inside & (t + 2 < count)
        q2_re, q2_im = load_pair(q + (t + 2) * q_token, C, later)
        k2_re, k2_im = load_pair(k + (t + 2) * k_token, C, later)
        v2_re, v2_im = load_pair(v + (t + 2) * v_token, C, later)
        observed = precision > 0
        if TIMED:
            time, lag = token_lag(times, first + t, time, is_old | (t > 0))
            decay, cosine, sine, grown = transition(rate, process, omega, lag, PTX)
        p_key_re, p_key_im = key_re * cosine - key_im * sine, key_re * sine + key_im * cosine
        p_value_re, p_value_im = value_re * cosine - value_im * sine, value_re * sine + value_im * cosine
        prior = tl.where(observed, precision * reciprocal(decay * decay + grown * precision, PTX), 0.0)
        noisy = noise * prior
        innovation = prior * reciprocal(1.0 + noisy, PTX) * inverse_nu
        step = tl.where(observed, step_size, 1.0)
        d_re, d_im = k_re - p_key_re, k_im - p_key_im
        key_re, key_im = p_key_re, p_key_im
        gain, weight = 0.0, 1.0
        for i in tl.static_range(ITERATIONS):
            y_re, y_im = q_re - key_re, q_im - key_im
            distance = tl.sum(y_re * y_re + y_im * y_im, 0) * innovation
            weight = tl.exp2(-temperature * log2(1.0 + distance, PTX))
            gain = step * weight * reciprocal(weight + noisy, PTX)
            key_re, key_im = p_key_re + gain * d_re, p_key_im + gain * d_im
            tl.store(weights + ((first + t) * H + head) * ITERATIONS + i, weight)
        value_re = p_value_re + gain * (v_re - p_value_re)
        value_im = p_value_im + gain * (v_im - p_value_im)
        precision = prior + weight / noise
        token = (first + t) * H + head
        out = means + token * 2 * C + channel
        tl.store(out, value_re.to(means.dtype.element_ty), mask=inside)
        tl.store(out + C, value_im.to(means.dtype.element_ty), mask=inside)
        out = states + token * 4 * C + channel
        tl.store(out, key_re, mask=inside)
        tl.store(out + C, key_im, mask=inside)
        tl.store(out + 2 * C, value_re, mask=inside)
        tl.store(out + 3 * C, value_im, mask=inside)
        tl.store(precisions + token, precision)
        tl.store(variances + token, 1.0 / precision)
        q_re, q_im, k_re, k_im, v_re, v_im = q1_re, q1_im, k1_re, k1_im, v1_re, v1_im
        q1_re, q1_im, k1_re, k1_im, v1_re, v1_im = q2_re, q2_im, k2_re, k2_im, v2_re, v2_im
    if not TIMED:
        time = tl.where(count > 0, tl.where(is_old, time + count, count - 1.0), time)
    out = final_mean + state * 2 * C + channel
    tl.store(out, key_re, mask=inside)
    tl.store(out + C, key_im, mask=inside)
    tl.store(out + H * 2 * C, value_re, mask=inside)
    tl.store(out + H * 2 * C + C, value_im, mask=inside)
    tl.store(final_precision + sequence * H + head, precision)
    tl.store(final_time + sequence, time, mask=head == 0)


def launch_options(q: Tensor, iterations: int, timed: bool, packed: bool) -> dict[str, Any]:
    """Return the constants of both kernels."""
    channels = q.shape[3] // 2
    block = 1 << (channels - 1).bit_length()
    return {
        "C": channels, "P": block, "ITERATIONS": iterations, "TIMED": timed, "PACKED": packed, "PTX": supports_ptx(),
        "num_warps": 1 if block <= 128 else 4,
    }  # fmt: skip


def strided(*tensors: Tensor) -> tuple[list[Tensor], list[int]]:
    """Return tensors whose tokens are one stride apart, and their strides of tokens and heads."""
    found = [contiguous_rows(x) for x in tensors]
    return found, [stride for x in found for stride in (x.stride(1), x.stride(2))]


def forward(
    q: Tensor, k: Tensor, v: Tensor, mean: Tensor, precision: Tensor, time: Tensor, params: Tensor, frequency: Tensor,
    times: Tensor | None, rows: Tensor | None, iterations: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Filter all sequences.

    Args:
        q, k, v: `[B, T, H, 2 C]`.
        mean, precision, time: the incoming belief.
        params: float32 `[6, H]`: rate, process noise, observation noise, nu, temperature and the logit of the step.
        frequency: float32 `[H, C]`.
        times: float64 `[B, T]`, or `None`.
        rows: int32 `[N, 3]`, rows and limits of packed sequences, or `None`.
        iterations: number of times that the weight is computed.

    Returns:
        Means `[B, T, H, 2 C]`, variances `[B, T, H, 1]`, the final belief, and for the backward pass: states
        `[B, T, H, 4 C]`, precisions `[B, T, H]` and weights `[B, T, H, iterations]`.
    """
    batch, tokens, heads, width = v.shape
    allocate = v.new_empty if rows is None else v.new_zeros
    means, float32 = allocate(v.shape), {"dtype": torch.float32, "device": v.device}
    variances = allocate(batch, tokens, heads, 1, dtype=torch.float32)
    states = torch.empty(batch, tokens, heads, 2 * width, **float32)
    precisions = torch.empty(batch, tokens, heads, **float32)
    weights = torch.empty(batch, tokens, heads, iterations, **float32)
    mean, precision, time, params, frequency = (x.contiguous() for x in (mean, precision, time, params, frequency))
    final = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (mean, precision, time)]
    tensors, strides = strided(q, k, v)
    args = (
        *tensors, *strides, mean, precision, time, params, frequency, time if times is None else times.contiguous(),
        time if rows is None else rows.contiguous(), means, variances, states, precisions, weights, *final, tokens,
        heads,
    )  # fmt: skip
    options = launch_options(q, iterations, times is not None, rows is not None)
    Launch(filter_kernel, (mean.shape[0], heads), args, options).run()
    return means, variances, *final, states, precisions, weights
