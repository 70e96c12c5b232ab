"""Forward pass of `attend_radial` in Triton: two online softmaxes, along and across the direction of each value.

A token that is not finite is set to 0, and its norm to NaN: so it affects only the scores of queries that attend to it,
and these return NaN. The backward pass ignores such queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._attend.triton.forward import MIN_SCORE
from kalmix.ops._attend.triton.radial_pairs import (
    UNSPECIALIZED,
    component_precision,
    decayed_weight,
    load_positions,
    load_radial_params,
    load_scalars,
    load_times_i,
    pair_costs,
    pair_residuals,
    visible_pairs,
    visible_range,
)
from kalmix.ops._attend.triton.radial_tiles import forward_tiles
from kalmix.ops._attend.triton.radial_tokens import TILE, outputs_kernel, rotate_tokens_kernel
from kalmix.ops._attend.triton.scores import LN2
from kalmix.ops._shared.gpu import shared_memory
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx
from kalmix.ops._shared.triton.tiles import contiguous_rows, dot_precision, load_rows, matmul, store_rows


@triton.jit
def online_softmax(cost, visible, temperature, max_score, weight_sum):
    """Return weights, scores, the new maximum and sum, and the factor of earlier accumulators.

    Weights are 2^(score - max_score) with integer `max_score`, so that the backward pass rounds them as this pass does.
    """
    score = tl.where(visible, -temperature * cost, float("-inf"))
    new_max = tl.maximum(max_score, tl.ceil(tl.max(score, 1)))
    # NaN is lost in a maximum, but not in the sum of weights.
    score = score - new_max[:, None]
    weight, rescale = tl.exp2(score), tl.exp2(max_score - new_max)
    return weight, score, new_max, weight_sum * rescale + tl.sum(weight, 1), rescale


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attend_radial_kernel(
    q, u, k, v, times, rank, query_scalars, key_norms, head_params, step, magnitudes, max_scores, weight_sums,
    log_precision, tokens, slots, window, H,
    K: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute rotated step and magnitude of one tile of queries of one row and head; tiles with most keys start first.

    Also store, `[2, R, H, tokens]` along and across: maximum scores (-`MIN_SCORE` if the output is not finite), sums of
    weights and, if `VARIANCE`, logarithms of the precision.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, past_length, at = tile * M, slots - tokens, tile * M + tl.arange(0, M)
    params, column = load_radial_params(head_params, head), tl.arange(0, P)
    place, stride = (row * H + head) * tokens + start, tl.num_programs(2).to(tl.int64) * H * tokens
    base = (row * H + head) * slots
    times, rank, count = times + row * slots, rank + row * slots, tokens - start
    query = load_rows(q + place * K, K, count, column, K, M)
    unit, unit_i = (
        load_rows(u + place * K, K, count, column, K, M), load_times_i(u + place * K, count, column, K, M, 1),
    )  # fmt: skip
    scalars = load_scalars(query_scalars, stride, place + tl.arange(0, M), at < tokens, 1)
    position = load_positions(times, rank, past_length + at, slots, 1)
    step_sum, magnitude = tl.zeros([M, P], tl.float32), tl.zeros([M], tl.float32)
    sum_0, sum_1 = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    max_0, max_1 = tl.full([M], MIN_SCORE, tl.float32), tl.full([M], MIN_SCORE, tl.float32)
    precision_0, precision_1 = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    begin, stop = 0, slots
    if CAUSAL:
        stop = tl.minimum(past_length + start + M, slots)
    if MASKED:
        own = tl.load(rank + past_length + at, mask=at < tokens, other=-(1 << 61))
        high, low = tl.max(own, 0), tl.min(tl.where(own > -(1 << 59), own, 1 << 61), 0)
        begin, stop = visible_range(rank, 0, stop, high, low, window, False, CAUSAL)
        begin = begin // N * N
    for first in tl.range(begin, stop, N, num_stages=STAGES):
        slot = first + tl.arange(0, N)
        key = load_rows(k + (base + first) * K, K, slots - first, column, K, N)
        value = load_rows(v + (base + first) * K, K, slots - first, column, K, N)
        key_norm = tl.load(key_norms + base + slot, mask=slot < slots, other=0.0)[None, :]
        key_position = load_positions(times, rank, slot, slots, 0)
        key_t = tl.trans(key)
        qk, uk = matmul(query, key_t, PRECISION), matmul(unit, key_t, PRECISION)
        iuk, uv = matmul(unit_i, key_t, PRECISION), matmul(unit, tl.trans(value), PRECISION)
        lags, _factors, _along, squared, variances = pair_residuals(
            qk, uk, iuk, scalars, key_norm, position[0], key_position[0], params, CAUSAL
        )
        costs = pair_costs(lags, squared, variances, params, RATIONAL, CAUSAL, PTX)
        visible = visible_pairs(position, key_position, slots, past_length, tokens, window, CAUSAL, MASKED)
        weight, score, max_0, sum_0, rescale = online_softmax(costs[0], visible, params[2][4], max_0, sum_0)
        decayed = decayed_weight(weight, score, lags, params[0], CAUSAL)
        magnitude = magnitude * rescale + tl.sum(decayed * uv, 1)
        weight, score, max_1, sum_1, rescale = online_softmax(costs[1], visible, params[3][4], max_1, sum_1)
        decayed = decayed_weight(weight, score, lags, params[0], CAUSAL)
        step_sum = matmul(decayed.to(value.dtype), value, PRECISION, step_sum * rescale[:, None])
        if VARIANCE:
            along = component_precision(squared[0], variances[0], params[2], lags[3], lags[2], RATIONAL, CAUSAL, PTX)
            across = component_precision(squared[1], variances[1], params[3], lags[3], lags[2], RATIONAL, CAUSAL, PTX)
            precision_0 += tl.sum(tl.where(visible, along, 0.0), 1)
            precision_1 += tl.sum(tl.where(visible, across, 0.0), 1)
    inside = at < tokens
    sum_0, sum_1 = tl.where(sum_0 == 0.0, 1.0, sum_0), tl.where(sum_1 == 0.0, 1.0, sum_1)  # no key: empty slots
    total = sum_0 + sum_1 + magnitude * 0.0
    finite = total == total
    store_rows(step + place * K, K, count, column, step_sum / sum_1[:, None], K, M)
    offset = place + tl.arange(0, M)
    tl.store(magnitudes + offset, tl.where(finite, magnitude / sum_0, total), mask=inside)
    tl.store(max_scores + offset, tl.where(finite, max_0, -MIN_SCORE), mask=inside)
    tl.store(max_scores + stride + offset, tl.where(finite, max_1, -MIN_SCORE), mask=inside)
    tl.store(weight_sums + offset, tl.where(finite, sum_0, 1.0), mask=inside)
    tl.store(weight_sums + stride + offset, tl.where(finite, sum_1, 1.0), mask=inside)
    if VARIANCE:
        tl.store(log_precision + offset, tl.where(finite, LN2 * tl.log2(precision_0), total), mask=inside)
        tl.store(log_precision + stride + offset, tl.where(finite, LN2 * tl.log2(precision_1), total), mask=inside)


class Rotated(NamedTuple):
    """Inputs of the kernels over pairs, from `rotate_tokens_kernel`.

    Attributes:
        q, direction: `[R, H, T, 2 C]`.
        k, v: `[R, H, S, 2 C]`.
        query_scalars: float32 `[3, R, H, T]`.
        key_norms: float32 `[R, H, S]`.
    """

    q: Tensor
    direction: Tensor
    k: Tensor
    v: Tensor
    query_scalars: Tensor
    key_norms: Tensor


def token_launch(q: Tensor, k: Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int], dict[str, Any]]:
    """Return the grid dims (without tiles), sizes and constexpr arguments of kernels over tokens."""
    (rows, tokens, heads, width), slots = q.shape, k.shape[1]
    compiled = {"C": width // 2, "P": max(1, 1 << (width // 2 - 1).bit_length()), "TILE": TILE, "num_warps": 4}
    return (-(-slots // TILE), heads, rows), (tokens, slots, heads), compiled


def strided(x: Tensor) -> tuple[Tensor, int, int]:
    """Return x `[R, T, H, 2 C]`, with all tokens one stride apart, and the strides of tokens and heads."""
    x = contiguous_rows(x)
    return x, x.stride(1), x.stride(2)


def rotate_tokens(q: Tensor, k: Tensor, v: Tensor, times: Tensor, frequency: Tensor, dtype: torch.dtype) -> Rotated:
    """Rotate tokens back to time 0."""
    (rows, tokens, heads, width), slots = q.shape, k.shape[1]
    rotated = Rotated(
        *(torch.empty(rows, heads, n, width, dtype=dtype, device=q.device) for n in (tokens, tokens, slots, slots)),
        torch.empty(3, rows, heads, tokens, dtype=torch.float32, device=q.device),
        torch.empty(rows, heads, slots, dtype=torch.float32, device=q.device),
    )
    grid, sizes, compiled = token_launch(q, k)
    (q, *q_strides), (k, *k_strides), (v, *v_strides) = strided(q), strided(k), strided(v)
    args = (q, k, v, *q_strides, *k_strides, *v_strides, times, frequency, *rotated, *sizes)
    Launch(rotate_tokens_kernel, grid, args, compiled).run()
    return rotated


def pair_options(q: Tensor, config: ScoreConfig, masked: bool, variance: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constexpr arguments of kernels over pairs."""
    width = q.shape[3]
    return {
        "K": width, "P": max(64, 1 << (width - 1).bit_length()), "RATIONAL": config.rational, "CAUSAL": config.causal,
        "MASKED": masked, "VARIANCE": variance, "PRECISION": dot_precision(dtype), "PTX": supports_ptx(),
    }  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, frequency: Tensor, times: Tensor, rank: Tensor, head_params: Tensor,
    config: ScoreConfig, masked: bool, variance: bool, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the forward pass.

    Returns:
        The mean `[R, T, H, 2 C]`, the logarithms of the precision `[2, R, H, T]` (or `[0]`), and for the backward pass:
        rotated steps `[R, H, T, 2 C]`, magnitudes `[R, H, T]`, maximum scores and sums of weights `[2, R, H, T]`, and
        the tensors of `Rotated`.
    """
    times, rank, head_params, frequency = (x.contiguous() for x in (times, rank, head_params, frequency))
    rotated = rotate_tokens(q, k, v, times, frequency, dtype)
    rows, tokens, heads, width = q.shape
    float32 = {"dtype": torch.float32, "device": q.device}
    step, magnitudes = torch.empty(rows, heads, tokens, width, **float32), torch.empty(rows, heads, tokens, **float32)
    max_scores, weight_sums = (torch.empty(2, rows, heads, tokens, **float32) for _ in range(2))
    log_precision = torch.empty((2, rows, heads, tokens) if variance else (0,), **float32)
    options = pair_options(q, config, masked, variance, dtype)
    tile = forward_tiles(options, dtype, shared_memory(q.device))
    args = (
        *rotated[:4], times, rank, *rotated[4:], head_params, step, magnitudes, max_scores, weight_sums, log_precision,
        tokens, k.shape[1], config.window, heads,
    )  # fmt: skip
    Launch(attend_radial_kernel, (-(-tokens // tile["M"]), heads, rows), args, options | tile).run()
    mean = torch.empty(q.shape, dtype=v.dtype, device=q.device)
    _grid, sizes, compiled = token_launch(q, k)
    v, *v_strides = strided(v)
    args = (v, *v_strides, times, frequency, step, magnitudes, mean, *sizes)
    Launch(outputs_kernel, (-(-tokens // TILE), heads, rows), args, compiled).run()
    return mean, log_precision, step, magnitudes, max_scores, weight_sums, *rotated
