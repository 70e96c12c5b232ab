"""Backward pass of the robust Kalman filter of `recurrent-afa`: one program per sequence and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.triton.robust_filter import (
    SIZES,
    launch_options,
    load_filter_params,
    load_pair,
    locate,
    strided,
    token_lag,
    transition,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.kappa import LOG2E, kappa, kappa_slope
from kalmix.ops._shared.triton.ptx import log2, reciprocal


@triton.jit
def load_step(
    q, k, v, grad_means, states, precisions, weights, t, q_token, k_token, v_token, g_token, H, C, inside, has_token,
    ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Load q, k, v and the gradient of the mean of token t; the state and the precision before it (0 for the first
    token); and its last weight. Return zeros unless `has_token`."""
    inside, s_token = inside & has_token, tl.cast(H * 4 * C, tl.int64)
    before = inside & (t > 0)
    return (
        load_pair(q + t * q_token, C, inside), load_pair(k + t * k_token, C, inside),
        load_pair(v + t * v_token, C, inside), load_pair(grad_means + t * g_token, C, inside),
        load_pair(states + (t - 1) * s_token, C, before), load_pair(states + (t - 1) * s_token + 2 * C, C, before),
        tl.load(precisions + (t - 1) * H, mask=has_token & (t > 0), other=0.0),
        tl.load(weights + t * H * ITERATIONS + ITERATIONS - 1, mask=has_token, other=0.0),
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def filter_backward_kernel(
    q, k, v, q_token, q_head, k_token, k_head, v_token, v_head, grad_means, g_token, g_head, grad_variances,
    prior_mean, prior_precision, prior_time, head_params, frequency, times, rows, states, precisions, weights,
    grad_mean, grad_precision, grad_q, grad_k, grad_v, grad_prior_mean, grad_prior_precision, grad_params,
    grad_frequency, tokens, H,
    C: tl.constexpr, P: tl.constexpr, ITERATIONS: tl.constexpr, TIMED: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `filter_kernel` for one sequence of one head, from the last token to the first.

    Partial sums of the gradients of parameters are `[N, 6, H]`, those of frequencies `[N, H, C]`.
    """
    sequence, first, count = locate(rows, tokens, PACKED)
    head, channel = tl.program_id(1), tl.arange(0, P)
    inside = channel < C
    rate, process, noise, inverse_nu, temperature, step_size = load_filter_params(head_params, head, H)
    omega = tl.load(frequency + head * C + channel, mask=inside, other=0.0)
    state = sequence * 2 * H + head
    first_precision = tl.load(prior_precision + sequence * H + head)
    is_old = tl.load(prior_precision + sequence * H) > 0
    first_time = tl.load(prior_time + sequence)
    prior_key = load_pair(prior_mean + state * 2 * C + channel, C, inside)
    prior_value = load_pair(prior_mean + (state + H) * 2 * C + channel, C, inside)
    gk_re, gk_im = load_pair(grad_mean + state * 2 * C + channel, C, inside)
    gv_re, gv_im = load_pair(grad_mean + (state + H) * 2 * C + channel, C, inside)
    grad_p = tl.load(grad_precision + sequence * H + head)
    decay, cosine, sine, grown = transition(rate, process, omega, 1.0, PTX)
    lag = 1.0
    q_token, k_token, v_token = tl.cast(q_token, tl.int64), tl.cast(k_token, tl.int64), tl.cast(v_token, tl.int64)
    q += first * q_token + head * q_head + channel
    k += first * k_token + head * k_head + channel
    v += first * v_token + head * v_head + channel
    g_token = tl.cast(g_token, tl.int64)
    grad_means += first * g_token + head * g_head + channel
    states += (first * H + head) * 4 * C + channel
    inverse_noise = 1.0 / noise
    angle_sum, log_decay_sum = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    grad_square, grad_grown, grad_rate, grad_process = 0.0, 0.0, 0.0, 0.0
    grad_noise, grad_nu, grad_temperature, grad_step = 0.0, 0.0, 0.0, 0.0
    last = count - 1
    precisions += first * H + head
    weights += (first * H + head) * ITERATIONS
    loaded = load_step(
        q, k, v, grad_means, states, precisions, weights, last, q_token, k_token, v_token, g_token, H, C, inside,
        count > 0, ITERATIONS,
    )  # fmt: skip
    before, weight = loaded[6], loaded[7]
    q_re, q_im, k_re, k_im = loaded[0][0], loaded[0][1], loaded[1][0], loaded[1][1]
    v_re, v_im, g_re, g_im = loaded[2][0], loaded[2][1], loaded[3][0], loaded[3][1]
    zk_re, zk_im, zv_re, zv_im = loaded[4][0], loaded[4][1], loaded[5][0], loaded[5][1]
    for i in range(count):
        t = last - i
        upcoming = load_step(
            q, k, v, grad_means, states, precisions, weights, t - 1, q_token, k_token, v_token, g_token, H, C, inside,
            t > 0, ITERATIONS,
        )  # fmt: skip
        token = (first + t) * H + head
        precision = tl.where(t > 0, before, first_precision)
        is_first = t == 0
        zk_re, zk_im = tl.where(is_first, prior_key[0], zk_re), tl.where(is_first, prior_key[1], zk_im)
        zv_re, zv_im = tl.where(is_first, prior_value[0], zv_re), tl.where(is_first, prior_value[1], zv_im)
        if TIMED:
            previous = tl.where(t > 0, tl.load(times + first + t - 1, mask=t > 0, other=0.0), first_time)
            _now, lag = token_lag(times, first + t, previous, is_old | (t > 0))
            decay, cosine, sine, grown = transition(rate, process, omega, lag, PTX)
        observed = precision > 0
        p_key_re, p_key_im = zk_re * cosine - zk_im * sine, zk_re * sine + zk_im * cosine
        p_value_re, p_value_im = zv_re * cosine - zv_im * sine, zv_re * sine + zv_im * cosine
        square = decay * decay
        inverse = tl.where(observed, reciprocal(square + grown * precision, PTX), 0.0)
        prior = precision * inverse
        noisy = noise * prior
        inverse_noisy = reciprocal(1.0 + noisy, PTX)
        innovation = prior * inverse_noisy
        step = tl.where(observed, step_size, 1.0)
        d_re, d_im = k_re - p_key_re, k_im - p_key_im
        gv_re, gv_im = gv_re + g_re, gv_im + g_im
        if VARIANCE:
            posterior = prior + weight * inverse_noise
            grad_p -= tl.load(grad_variances + token) * reciprocal(posterior * posterior, PTX)
        grad_weight, grad_prior, grad_innovation, grad_noisy = grad_p * inverse_noise, grad_p, 0.0, 0.0
        grad_noise -= grad_p * weight * inverse_noise * inverse_noise
        grad_predicted_re, grad_predicted_im = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
        gq_re, gq_im = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
        gobs_re, gobs_im = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
        # Values: only the last round changes them.
        e_re, e_im = v_re - p_value_re, v_im - p_value_im
        inverse_sum = reciprocal(weight + noisy, PTX)
        gain = weight * inverse_sum
        products = gv_re * e_re + gv_im * e_im + gk_re * d_re + gk_im * d_im
        factor = step * gain
        grad_v_re, grad_v_im = factor * gv_re, factor * gv_im
        gv_re, gv_im = gv_re - grad_v_re, gv_im - grad_v_im
        for j in tl.static_range(ITERATIONS):
            along = tl.sum(products, 0)
            gobs_re, gobs_im = gobs_re + factor * gk_re, gobs_im + factor * gk_im
            grad_predicted_re += (1.0 - factor) * gk_re
            grad_predicted_im += (1.0 - factor) * gk_im
            grad_step += tl.where(observed, along * gain, 0.0)
            grad_gain = along * step * inverse_sum * inverse_sum
            grad_weight += grad_gain * noisy
            grad_noisy -= grad_gain * weight
            y_re, y_im, gain_0, weight_0, inverse_0 = q_re - p_key_re, q_im - p_key_im, 0.0, weight, inverse_sum
            if j + 1 < ITERATIONS:
                weight_0 = tl.load(weights + t * H * ITERATIONS + ITERATIONS - 2 - j)
                inverse_0 = reciprocal(weight_0 + noisy, PTX)
                gain_0 = weight_0 * inverse_0
                y_re, y_im = y_re - step * gain_0 * d_re, y_im - step * gain_0 * d_im
            norm = tl.sum(y_re * y_re + y_im * y_im, 0)
            distance = norm * innovation
            base = 1.0 + distance * inverse_nu
            grad_temperature -= grad_weight * weight * log2(base, PTX)
            grad_base = -grad_weight * temperature * weight * reciprocal(base, PTX)
            grad_nu -= grad_base * distance
            grad_distance = grad_base * inverse_nu
            grad_innovation += grad_distance * norm
            pull = 2.0 * grad_distance * innovation
            gq_re, gq_im = gq_re + pull * y_re, gq_im + pull * y_im
            gk_re, gk_im = -pull * y_re, -pull * y_im
            products = gk_re * d_re + gk_im * d_im
            weight, gain, inverse_sum, factor, grad_weight = weight_0, gain_0, inverse_0, step * gain_0, 0.0
        grad_predicted_re += gk_re
        grad_predicted_im += gk_im
        grad_noise += grad_noisy * prior - grad_innovation * innovation * innovation
        grad_prior += grad_noisy * noise + grad_innovation * inverse_noisy * inverse_noisy
        grad_p = grad_prior * square * inverse * inverse
        grad_square_t = -grad_prior * prior * inverse
        grad_grown_t = -grad_prior * prior * prior
        log_decay_t = (
            grad_predicted_re * p_key_re + grad_predicted_im * p_key_im + gv_re * p_value_re + gv_im * p_value_im
        )
        angle_t = grad_predicted_im * p_key_re - grad_predicted_re * p_key_im + gv_im * p_value_re - gv_re * p_value_im
        angle_sum += angle_t * lag
        log_decay_sum += log_decay_t * lag
        if TIMED:
            unit_growth = kappa(rate, lag, decay)
            grad_process += grad_grown_t * unit_growth
            grad_rate += (
                grad_grown_t * process * kappa_slope(rate, lag, decay, PTX) - 2.0 * lag * square * grad_square_t
            )
        else:
            grad_grown += grad_grown_t
            grad_square += grad_square_t
        gk_re, gk_im = (
            grad_predicted_re * cosine + grad_predicted_im * sine,
            grad_predicted_im * cosine - grad_predicted_re * sine,
        )  # fmt: skip
        gv_re, gv_im = gv_re * cosine + gv_im * sine, gv_im * cosine - gv_re * sine
        out = token * 2 * C + channel
        tl.store(grad_q + out, gq_re.to(grad_q.dtype.element_ty), mask=inside)
        tl.store(grad_q + out + C, gq_im.to(grad_q.dtype.element_ty), mask=inside)
        tl.store(grad_k + out, gobs_re.to(grad_k.dtype.element_ty), mask=inside)
        tl.store(grad_k + out + C, gobs_im.to(grad_k.dtype.element_ty), mask=inside)
        tl.store(grad_v + out, grad_v_re.to(grad_v.dtype.element_ty), mask=inside)
        tl.store(grad_v + out + C, grad_v_im.to(grad_v.dtype.element_ty), mask=inside)
        q_re, q_im, k_re, k_im = upcoming[0][0], upcoming[0][1], upcoming[1][0], upcoming[1][1]
        v_re, v_im, g_re, g_im = upcoming[2][0], upcoming[2][1], upcoming[3][0], upcoming[3][1]
        zk_re, zk_im, zv_re, zv_im = upcoming[4][0], upcoming[4][1], upcoming[5][0], upcoming[5][1]
        before, weight = upcoming[6], upcoming[7]
    if not TIMED:
        grad_process = grad_grown * kappa(rate, 1.0, decay)
        grad_rate = grad_grown * process * kappa_slope(rate, 1.0, decay, PTX) - 2.0 * decay * decay * grad_square
    out = grad_prior_mean + state * 2 * C + channel
    tl.store(out, gk_re, mask=inside)
    tl.store(out + C, gk_im, mask=inside)
    tl.store(out + H * 2 * C, gv_re, mask=inside)
    tl.store(out + H * 2 * C + C, gv_im, mask=inside)
    tl.store(grad_prior_precision + sequence * H + head, grad_p)
    out = grad_params + sequence * 6 * H + head
    tl.store(out, grad_rate - tl.sum(log_decay_sum, 0))
    tl.store(out + H, grad_process)
    tl.store(out + 2 * H, grad_noise)
    tl.store(out + 3 * H, grad_nu * inverse_nu * inverse_nu)
    tl.store(out + 4 * H, grad_temperature / LOG2E)
    tl.store(out + 5 * H, grad_step * step_size * (1.0 - step_size))
    tl.store(grad_frequency + (sequence * H + head) * C + channel, angle_sum, mask=inside)


def backward(
    q: Tensor, k: Tensor, v: Tensor, mean: Tensor, precision: Tensor, time: Tensor, params: Tensor, frequency: Tensor,
    times: Tensor | None, rows: Tensor | None, saved: list[Tensor], grads: list[Tensor | None], iterations: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k, v, mean, precision, params and frequency.

    Args:
        q, k, v, mean, precision, time, params, frequency, times, rows, iterations: as in `forward`.
        saved: the last three outputs of `forward`.
        grads: gradients of means, variances, and of mean and precision of the final belief; `None` for 0.
    """
    _, tokens, heads, width = v.shape
    count, channels = mean.shape[0], width // 2
    mean, precision, time, params, frequency = (x.contiguous() for x in (mean, precision, time, params, frequency))
    grad_means, grad_variances, grad_mean, grad_precision = grads
    grad_means = torch.zeros_like(v) if grad_means is None else grad_means
    grad_mean = torch.zeros_like(mean) if grad_mean is None else grad_mean.contiguous()
    grad_precision = torch.zeros_like(precision) if grad_precision is None else grad_precision.contiguous()
    tensors, strides = strided(q, k, v, grad_means)
    *tensors, grad_means = tensors
    allocate = torch.empty if rows is None else torch.zeros
    token_grads = [allocate(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    outputs = [torch.empty(x.shape, dtype=torch.float32, device=v.device) for x in (mean, precision)]
    partial = [torch.empty(count, *x, dtype=torch.float32, device=v.device) for x in ((6, heads), (heads, channels))]
    args = (
        *tensors, *strides[:6], grad_means, *strides[6:],
        precision if grad_variances is None else grad_variances.contiguous(), mean, precision, time, params, frequency,
        time if times is None else times.contiguous(), time if rows is None else rows.contiguous(), *saved, grad_mean,
        grad_precision, *token_grads, *outputs, *partial, tokens, heads,
    )  # fmt: skip
    options = launch_options(q, iterations, times is not None, rows is not None)
    Launch(filter_backward_kernel, (count, heads), args, options | {"VARIANCE": grad_variances is not None}).run()
    return *token_grads, *outputs, *(x.sum(0, dtype=torch.float64).to(torch.float32) for x in partial)
