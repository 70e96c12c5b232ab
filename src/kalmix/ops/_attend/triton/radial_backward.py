"""Backward pass of `attend_radial` in Triton; scores are recomputed tile by tile, and nothing is stored per pair.

`radial_query_grads_kernel` sums over keys, and `radial_key_grads_kernel` over queries, so that results are
deterministic. The latter has keys on the first axis of the tile: no product is transposed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._attend.triton.parameters import PARTIAL_SUMS, partial_sums
from kalmix.ops._attend.triton.radial_forward import Rotated, pair_options, strided, token_launch
from kalmix.ops._attend.triton.radial_pairs import (
    PARAMS,
    UNSPECIALIZED,
    component_precision,
    component_vjp,
    decayed_weight,
    load_positions,
    load_radial_params,
    load_scalars,
    load_times_i,
    pair_costs,
    pair_residuals,
    residual_vjp,
    visible_pairs,
    visible_range,
    zero_nan,
)
from kalmix.ops._attend.triton.radial_tiles import backward_tiles
from kalmix.ops._attend.triton.radial_tokens import TILE, outputs_backward_kernel, tokens_backward_kernel
from kalmix.ops._attend.triton.scores import LN2, kappa_slope
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import round_like
from kalmix.ops._shared.triton.tiles import load_rows, matmul, store_rows


@triton.jit
def component_grads(
    cost, visible, query, grad_value, grad_sum, squared, variances, noise, lags, rate, like,
    RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one component of a tile.

    Args:
        query: maximum score and gradient of the precision of queries.
        grad_value: gradient of the normalized weight with decay, divided by the sum of weights.
        grad_sum: sum of the normalized weights of a query times their gradients, divided by the sum of weights.
        like: tensor to whose dtype the forward pass rounds the weight with decay; float32 for none.

    Returns:
        The weight with decay; its part of the gradient of the logarithm of the decay; the gradients of `component_vjp`;
        and that of the logarithm of the temperature.
    """
    max_score, grad_precision = query
    log_weight = -noise[4] * cost - max_score
    score = tl.where(visible, log_weight, float("-inf"))
    weight = tl.exp2(score)
    decayed = round_like(decayed_weight(weight, score, lags, rate, CAUSAL), like, PTX)
    grad_decayed = decayed * grad_value
    grad_score = grad_decayed - weight * grad_sum
    grad_log_precision = 0.0
    if VARIANCE:
        precision = component_precision(squared, variances, noise, lags[3], lags[2], RATIONAL, CAUSAL, PTX)
        grad_log_precision = tl.where(visible, precision * grad_precision, 0.0)
    grads = component_vjp(
        grad_score, grad_log_precision, squared, variances, noise, lags[3] * lags[3], lags[1], lags[2], RATIONAL,
        CAUSAL, VARIANCE, PTX,
    )  # fmt: skip
    return decayed, grad_decayed, grads, grad_score * tl.where(visible, log_weight, 0.0)


@triton.jit
def pair_gradients(
    qk, uk, iuk, uv, grad_step_v, query, key_norm, query_time, key_time, visible, params, like,
    RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of pairs.

    `query` has the scalars of queries, (gradient of the magnitude, two sums), and the first argument of
    `component_grads` along and across. Returns what `parameter_grads` and the sums of the kernels need.
    """
    scalars, sums, along_query, across_query = query
    lags, factors, along, squared, variances = pair_residuals(
        qk, uk, iuk, scalars, key_norm, query_time, key_time, params, CAUSAL
    )
    costs = pair_costs(lags, squared, variances, params, RATIONAL, CAUSAL, PTX)
    decayed_0, grad_decayed_0, grads_0, heat_0 = component_grads(
        costs[0], visible, along_query, sums[0] * uv, sums[1], squared[0], variances[0], params[2], lags, params[0],
        uv, RATIONAL, CAUSAL, VARIANCE, PTX,
    )  # fmt: skip
    decayed_1, grad_decayed_1, grads_1, heat_1 = component_grads(
        costs[1], visible, across_query, grad_step_v, sums[2], squared[1], variances[1], params[3], lags, params[0],
        like, RATIONAL, CAUSAL, VARIANCE, PTX,
    )  # fmt: skip
    products, query_grads, grad_key_norm, grad_decay, grad_floor = residual_vjp(
        qk, uk, iuk, scalars, key_norm, lags, factors, along, (grads_0[0], grads_1[0]), params, CAUSAL
    )
    return (
        (decayed_0, decayed_1), (grads_0, grads_1), (heat_0, heat_1), grad_decayed_0 + grad_decayed_1, lags, products,
        query_grads, grad_key_norm, grad_decay, grad_floor,
    )  # fmt: skip


@triton.jit
def add_parameter_grads(sums, grads, params, CAUSAL: tl.constexpr, PTX: tl.constexpr):
    """Add a tile of pairs to the sums of gradients of the parameters, in the order of `load_radial_params`."""
    _decayed, components, heat, grad_log_weight, lags, _products, _query, _key, grad_decay, grad_floor = grads
    lag, distance, future, decay, growth = lags
    rate, _floor, along, across = params
    square, slope = decay * decay, kappa_slope(rate, distance, decay, PTX)
    key_weight, query_weight, falling = square, 1.0, 2.0 * distance * square
    if not CAUSAL:
        key_weight, query_weight = tl.where(future, 1.0, square), tl.where(future, square, 1.0)
        falling = tl.where(future, 0.0, falling)
    state_0, state_1 = components[0][2], components[1][2]
    grad_rate = (
        slope * (along[0] * state_0 + across[0] * state_1) - falling * (along[1] * state_0 + across[1] * state_1)
        - distance * decay * grad_decay + components[0][4] + components[1][4]
    )  # fmt: skip
    if CAUSAL:
        grad_rate -= distance * grad_log_weight
    else:
        grad_rate -= lag * grad_log_weight
    return (
        sums[0] + partial_sums(grad_rate),
        sums[1] + partial_sums(growth * state_0), sums[2] + partial_sums(growth * state_1),
        sums[3] + partial_sums(key_weight * state_0), sums[4] + partial_sums(key_weight * state_1),
        sums[5] + partial_sums(query_weight * components[0][1]),
        sums[6] + partial_sums(query_weight * components[1][1]),
        sums[7] + partial_sums(components[0][3]), sums[8] + partial_sums(components[1][3]),
        sums[9] + partial_sums(heat[0]), sums[10] + partial_sums(heat[1]), sums[11] + partial_sums(grad_floor),
    )  # fmt: skip


@triton.jit
def load_query_sums(query_grads, max_scores, grad_precision, stride, at, mask, AXIS: tl.constexpr,
                    VARIANCE: tl.constexpr):  # fmt: skip
    """Load the last three items of `query` in `pair_gradients`; weights of masked queries are 0."""
    along_precision, across_precision = 0.0, 0.0
    if VARIANCE:
        along_precision = tl.expand_dims(tl.load(grad_precision + at, mask=mask, other=0.0), AXIS)
        across_precision = tl.expand_dims(tl.load(grad_precision + stride + at, mask=mask, other=0.0), AXIS)
    along = (
        tl.expand_dims(tl.load(max_scores + at, mask=mask, other=3e38), AXIS),
        along_precision,
    )  # fmt: skip
    across = (
        tl.expand_dims(tl.load(max_scores + stride + at, mask=mask, other=3e38), AXIS),
        across_precision,
    )  # fmt: skip
    return load_scalars(query_grads, stride, at, mask, AXIS), along, across


@triton.jit
def zero_nan_scalars(scalars):
    return zero_nan(scalars[0]), scalars[1], scalars[2]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def radial_query_grads_kernel(
    q, u, k, v, times, rank, query_scalars, key_norms, head_params, grad_step, query_grads, max_scores,
    grad_precision, grad_q, grad_u, grad_scalars, grad_params, tokens, slots, window, H,
    K: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of rotated queries, directions and scalars, and partial sums of parameters."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, past_length, at = tile * M, slots - tokens, tile * M + tl.arange(0, M)
    params, column = load_radial_params(head_params, head), tl.arange(0, P)
    place, stride = (row * H + head) * tokens + start, tl.num_programs(2).to(tl.int64) * H * tokens
    base = (row * H + head) * slots
    times, rank, count, inside = times + row * slots, rank + row * slots, tokens - start, at < tokens
    query, unit = load_rows(q + place * K, K, count, column, K, M), load_rows(u + place * K, K, count, column, K, M)
    upstream = load_rows(grad_step + place * K, K, count, column, K, M)
    scalars = zero_nan_scalars(load_scalars(query_scalars, stride, place + tl.arange(0, M), inside, 1))
    sums, along, across = load_query_sums(
        query_grads, max_scores, grad_precision, stride, place + tl.arange(0, M), inside, 1, VARIANCE
    )
    position = load_positions(times, rank, past_length + at, slots, 1)
    query_sum, unit_sum = tl.zeros([M, P], tl.float32), tl.zeros([M, P], tl.float32)
    norm_sum, real_sum = tl.zeros([M, PARTIAL_SUMS], tl.float32), tl.zeros([M, PARTIAL_SUMS], tl.float32)
    imaginary_sum = tl.zeros([M, PARTIAL_SUMS], tl.float32)
    p_0, p_1, p_2 = (tl.zeros([M, PARTIAL_SUMS], tl.float32), tl.zeros([M, PARTIAL_SUMS], tl.float32),
                     tl.zeros([M, PARTIAL_SUMS], tl.float32))  # fmt: skip
    p_3, p_4, p_5 = (tl.zeros([M, PARTIAL_SUMS], tl.float32), tl.zeros([M, PARTIAL_SUMS], tl.float32),
                     tl.zeros([M, PARTIAL_SUMS], tl.float32))  # fmt: skip
    p_6, p_7, p_8 = (tl.zeros([M, PARTIAL_SUMS], tl.float32), tl.zeros([M, PARTIAL_SUMS], tl.float32),
                     tl.zeros([M, PARTIAL_SUMS], tl.float32))  # fmt: skip
    p_9, p_10, p_11 = (tl.zeros([M, PARTIAL_SUMS], tl.float32), tl.zeros([M, PARTIAL_SUMS], tl.float32),
                       tl.zeros([M, PARTIAL_SUMS], tl.float32))  # fmt: skip
    begin, stop = 0, slots
    if CAUSAL:
        stop = tl.minimum(past_length + start + M, slots)
    if MASKED:
        own = tl.load(rank + past_length + at, mask=inside, other=-(1 << 61))
        high, low = tl.max(own, 0), tl.min(tl.where(own > -(1 << 59), own, 1 << 61), 0)
        begin, stop = visible_range(rank, 0, stop, high, low, window, False, CAUSAL)
        begin = begin // N * N
    for first in tl.range(begin, stop, N, num_stages=STAGES):
        slot, rows = first + tl.arange(0, N), slots - first
        key = load_rows(k + (base + first) * K, K, rows, column, K, N)
        key_i = load_times_i(k + (base + first) * K, rows, column, K, N, -1)
        value = load_rows(v + (base + first) * K, K, rows, column, K, N)
        key_norm = zero_nan(tl.load(key_norms + base + slot, mask=slot < slots, other=0.0))[None, :]
        key_position = load_positions(times, rank, slot, slots, 0)
        key_t, value_t = tl.trans(key), tl.trans(value)
        qk, uk = matmul(query, key_t, PRECISION), matmul(unit, key_t, PRECISION)
        iuk, uv = matmul(unit, tl.trans(key_i), PRECISION), matmul(unit, value_t, PRECISION)
        grad_step_v = matmul(upstream, value_t, PRECISION)
        visible = visible_pairs(position, key_position, slots, past_length, tokens, window, CAUSAL, MASKED)
        grads = pair_gradients(
            qk, uk, iuk, uv, grad_step_v, (scalars, sums, along, across), key_norm, position[0], key_position[0],
            visible, params, value, RATIONAL, CAUSAL, VARIANCE, PTX,
        )  # fmt: skip
        products, query_parts = grads[5], grads[6]
        query_sum = matmul(products[0].to(key.dtype), key, PRECISION, query_sum)
        unit_sum = matmul(products[1].to(key.dtype), key, PRECISION, unit_sum)
        unit_sum = matmul(products[2].to(key.dtype), key_i, PRECISION, unit_sum)
        unit_sum = matmul((grads[0][0] * sums[0]).to(key.dtype), value, PRECISION, unit_sum)
        norm_sum += partial_sums(query_parts[0])
        real_sum += partial_sums(query_parts[1])
        imaginary_sum += partial_sums(query_parts[2])
        p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11 = add_parameter_grads(
            (p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11), grads, params, CAUSAL, PTX
        )
    store_rows(grad_q + place * K, K, count, column, query_sum, K, M)
    store_rows(grad_u + place * K, K, count, column, unit_sum, K, M)
    offset = grad_scalars + place + tl.arange(0, M)
    tl.store(offset, tl.sum(norm_sum, 1), mask=inside)
    tl.store(offset + stride, tl.sum(real_sum, 1), mask=inside)
    tl.store(offset + 2 * stride, tl.sum(imaginary_sum, 1), mask=inside)
    out = grad_params + ((row * tl.num_programs(0) + tile) * H + head) * PARAMS
    _rate, _floor, noise_0, noise_1 = params
    tl.store(out, tl.sum(tl.sum(p_0, 1), 0))
    tl.store(out + 1, tl.sum(tl.sum(p_1, 1), 0))
    tl.store(out + 2, tl.sum(tl.sum(p_2, 1), 0))
    tl.store(out + 3, tl.sum(tl.sum(p_3, 1), 0))
    tl.store(out + 4, tl.sum(tl.sum(p_4, 1), 0))
    tl.store(out + 5, tl.sum(tl.sum(p_5, 1), 0))
    tl.store(out + 6, tl.sum(tl.sum(p_6, 1), 0))
    tl.store(out + 7, -noise_0[3] * noise_0[3] * tl.sum(tl.sum(p_7, 1), 0))
    tl.store(out + 8, -noise_1[3] * noise_1[3] * tl.sum(tl.sum(p_8, 1), 0))
    tl.store(out + 9, LN2 / noise_0[4] * tl.sum(tl.sum(p_9, 1), 0))
    tl.store(out + 10, LN2 / noise_1[4] * tl.sum(tl.sum(p_10, 1), 0))
    tl.store(out + 11, tl.sum(tl.sum(p_11, 1), 0))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def radial_key_grads_kernel(
    q, u, k, v, times, rank, query_scalars, key_norms, head_params, grad_step, query_grads, max_scores,
    grad_precision, grad_k, grad_v, grad_key_norms, tokens, slots, window, H,
    K: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of rotated keys and values, and of the squared norms of keys."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, past_length, slot = tile * N, slots - tokens, tile * N + tl.arange(0, N)
    params, column = load_radial_params(head_params, head), tl.arange(0, P)
    place, stride = (row * H + head) * tokens, tl.num_programs(2).to(tl.int64) * H * tokens
    base, rows = (row * H + head) * slots + start, slots - start
    times, rank = times + row * slots, rank + row * slots
    key, value = load_rows(k + base * K, K, rows, column, K, N), load_rows(v + base * K, K, rows, column, K, N)
    key_norm = zero_nan(tl.load(key_norms + base + tl.arange(0, N), mask=slot < slots, other=0.0))[:, None]
    key_position = load_positions(times, rank, slot, slots, 1)
    key_sum, value_sum = tl.zeros([N, P], tl.float32), tl.zeros([N, P], tl.float32)
    norm_sum = tl.zeros([N, PARTIAL_SUMS], tl.float32)
    begin, stop = 0, tokens
    if CAUSAL:
        begin = tl.maximum(start - past_length, 0) // M * M
    if MASKED:
        own = tl.load(rank + slot, mask=slot < slots, other=-(1 << 61))
        high, low = tl.max(own, 0), tl.min(tl.where(own > -(1 << 59), own, 1 << 61), 0)
        begin, stop = visible_range(rank, past_length + begin, slots, high, low, window, True, CAUSAL)
        begin, stop = (begin - past_length) // M * M, stop - past_length
    for first in tl.range(begin, stop, M, num_stages=STAGES):
        at, count = first + tl.arange(0, M), tokens - first
        query = load_rows(q + (place + first) * K, K, count, column, K, M)
        unit = load_rows(u + (place + first) * K, K, count, column, K, M)
        unit_i = load_times_i(u + (place + first) * K, count, column, K, M, 1)
        upstream = load_rows(grad_step + (place + first) * K, K, count, column, K, M)
        inside = at < tokens
        scalars = zero_nan_scalars(load_scalars(query_scalars, stride, place + at, inside, 0))
        sums, along, across = load_query_sums(
            query_grads, max_scores, grad_precision, stride, place + at, inside, 0, VARIANCE
        )
        position = load_positions(times, rank, past_length + at, slots, 0)
        unit_t = tl.trans(unit)
        qk, uk = matmul(key, tl.trans(query), PRECISION), matmul(key, unit_t, PRECISION)
        iuk, uv = matmul(key, tl.trans(unit_i), PRECISION), matmul(value, unit_t, PRECISION)
        grad_step_v = matmul(value, tl.trans(upstream), PRECISION)
        visible = visible_pairs(position, key_position, slots, past_length, tokens, window, CAUSAL, MASKED)
        grads = pair_gradients(
            qk, uk, iuk, uv, grad_step_v, (scalars, sums, along, across), key_norm, position[0], key_position[0],
            visible, params, value, RATIONAL, CAUSAL, VARIANCE, PTX,
        )  # fmt: skip
        products = grads[5]
        key_sum = matmul(products[0].to(key.dtype), query, PRECISION, key_sum)
        key_sum = matmul(products[1].to(key.dtype), unit, PRECISION, key_sum)
        key_sum = matmul(products[2].to(key.dtype), unit_i, PRECISION, key_sum)
        value_sum = matmul((grads[0][0] * sums[0]).to(key.dtype), unit, PRECISION, value_sum)
        value_sum = matmul(grads[0][1].to(key.dtype), upstream, PRECISION, value_sum)
        norm_sum += partial_sums(grads[7])
    store_rows(grad_k + base * K, K, rows, column, key_sum, K, N)
    store_rows(grad_v + base * K, K, rows, column, value_sum, K, N)
    tl.store(grad_key_norms + base + tl.arange(0, N), tl.sum(norm_sum, 1), mask=slot < slots)


def backward(
    grad_mean: Tensor, grad_log_precision: Tensor, saved: list[Tensor], v: Tensor, frequency: Tensor, times: Tensor,
    rank: Tensor, head_params: Tensor, config: ScoreConfig, masked: bool, variance: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k and v, in `dtype`, of frequencies and of parameters.

    `saved` has the outputs of `forward` from the logarithms of the precision on.
    """
    log_precision, step, magnitudes, max_scores, weight_sums, *tensors = saved
    rotated = Rotated(*tensors)
    times, rank, head_params, frequency = (x.contiguous() for x in (times, rank, head_params, frequency))
    (grad_mean, *g_strides), (v, *v_strides) = strided(grad_mean), strided(v)
    (rows, heads, tokens, width), slots, device = rotated.q.shape, rotated.k.shape[2], grad_mean.device
    float32 = {"dtype": torch.float32, "device": device}
    # Gradient of the sum of precisions.
    grad_precision = grad_log_precision * (-log_precision).exp() if variance else grad_log_precision
    if variance:
        grad_precision = grad_precision.masked_fill(max_scores > 1e38, 0)
    grad_step = torch.empty_like(rotated.q)
    query_grads = torch.empty(3, rows, heads, tokens, **float32)
    grid, sizes, compiled = token_launch(v[:, slots - tokens :], v)
    values = v, *v_strides, times, frequency
    args = (grad_mean, *g_strides, *values, step, magnitudes, max_scores, weight_sums, grad_step, query_grads, *sizes)
    Launch(outputs_backward_kernel, (-(-tokens // TILE), heads, rows), args, compiled).run()

    options = pair_options(v, config, masked, variance, rotated.q.dtype)
    inputs = (
        *rotated[:4], times, rank, *rotated[4:], head_params, grad_step, query_grads, max_scores, grad_precision,
    )  # fmt: skip
    integers = tokens, slots, config.window, heads
    grad_q, grad_u = (torch.empty(rotated.q.shape, **float32) for _ in range(2))
    grad_scalars = torch.empty(3, rows, heads, tokens, **float32)
    tile = backward_tiles()
    tiles = -(-tokens // tile["M"])
    grad_params = torch.empty(rows * tiles, heads, 12, **float32)
    outputs = grad_q, grad_u, grad_scalars, grad_params
    Launch(radial_query_grads_kernel, (tiles, heads, rows), (*inputs, *outputs, *integers), options | tile).run()
    grad_k, grad_v = (torch.empty(rotated.k.shape, **float32) for _ in range(2))
    grad_norms = torch.empty(rows, heads, slots, **float32)
    grid_keys = -(-slots // tile["N"]), heads, rows
    args = (*inputs, grad_k, grad_v, grad_norms, *integers)
    Launch(radial_key_grads_kernel, grid_keys, args, options | tile).run()

    results = [torch.empty(rows, n, heads, width, dtype=dtype, device=device) for n in (tokens, slots, slots)]
    grad_frequency = torch.empty(rows * grid[0], heads, width // 2, **float32)
    args = (
        grad_mean, *g_strides, *values, step, magnitudes, max_scores, weight_sums, grad_step, *rotated[:4],
        rotated.key_norms, grad_q, grad_u, grad_scalars, grad_k, grad_v, grad_norms, *results, grad_frequency, *sizes,
    )  # fmt: skip
    Launch(tokens_backward_kernel, grid, args, compiled).run()
    sums = (x.sum(0, dtype=torch.float64).to(head_params.dtype) for x in (grad_frequency, grad_params))
    return *results, *sums  # pyright: ignore[reportReturnType]
