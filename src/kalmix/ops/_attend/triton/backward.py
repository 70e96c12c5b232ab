"""Backward pass of `attend` in Triton; scores are recomputed tile by tile, and nothing is stored per pair.

Two launches: `query_grads_kernel` loops over all keys of a tile of queries, as the forward pass does, and
`key_grads_kernel` over all queries of a tile of keys, with transposed tiles. Both also sum the gradients of the
parameters of their head, one partial sum per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._attend.triton.block_masks import (
    UNSPECIALIZED,
    all_visible,
    feature_count,
    lag_between_blocks,
    load_block_ranks,
    load_tokens,
    visible_block_range,
)
from kalmix.ops._attend.triton.forward import MIN_SCORE, launch_shape, split_slices
from kalmix.ops._attend.triton.parameters import (
    PARTIAL_SUMS,
    add_key_side_grads,
    add_pair_grads,
    add_query_side_grads,
    key_side_noise_grads,
    partial_sums,
    sum_all,
    sum_to_column,
)
from kalmix.ops._attend.triton.rotary import frequency_grad_buffers, rotate_backward, sum_frequency_grads
from kalmix.ops._attend.triton.score_gradients import DOMINANCE, add_other_keys, load_key_tile, score_gradients
from kalmix.ops._attend.triton.scores import LN2, LOG2E, load_head_params
from kalmix.ops._attend.triton.tile_sizes import key_grad_tiles, query_grad_tiles
from kalmix.ops._shared.gpu import shared_memory
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import load_rows, matmul, store_rows

NUM_PARAMS = tl.constexpr(11)


@triton.jit
def accumulate_query_grads(
    grad_q, grad_norm, sums, query, grad_outputs, query_tokens, max_score, delta, rest, grad_precision, k, v, times,
    rank, key_features, block_lags, key_ranks, first, high, low, slots, key_blocks, window, H, G, params,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys, which begins at slot `first`, to the gradients of queries, their norms, and parameters."""
    key, qk, grad_weights, value, key_tokens, unmasked = load_key_tile(
        query, grad_outputs, k, v, times, rank, key_features, key_ranks, first, high, low, slots, key_blocks, window, H,
        G, K, P, V, W, BLOCK, N, SHARED, CAUSAL, MASKED, DIRECT, PRECISION,
    )  # fmt: skip
    _decayed, grads, residual, grad_temperature, grad_decayed, key_var, key_lag, value_lag, future = score_gradients(
        qk, grad_weights, value, query_tokens, key_tokens, block_lags, params, max_score, delta, rest, grad_precision,
        unmasked, slots, window, DIRECT, True, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE, PTX,
    )  # fmt: skip
    nu, temperature, noises = sums
    if DIRECT:
        noises = add_pair_grads(
            noises, grads, grad_decayed, key_var, key_lag, value_lag, future, params, SHARED, CAUSAL
        )
    else:
        noises = add_query_side_grads(noises, grads, grad_decayed, key_tokens, key_lag, value_lag, params, SHARED)
    sums = nu + partial_sums(grads[4] * residual), temperature + partial_sums(grad_temperature), noises
    grad_q = matmul(grads[0].to(key.dtype), key, PRECISION, grad_q)
    return grad_q, grad_norm + partial_sums(grads[1]), sums


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_grads_kernel(
    q, k, v, times, rank, query_features, query_block_times, query_ranks, key_features, key_block_times, key_ranks,
    head_params, output, grad_output, max_scores, deltas, rests, log_precision, grad_log_precision, grad_q,
    grad_head_params,
    tokens, slots, query_blocks, key_blocks, window, H, G, GROUP_SIZE,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    VARIANCE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of queries and, through them, of parameters; store the dot products of the output
    and its gradient (`deltas`) and `rests`."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    value_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, start, past_length = value_head // GROUP_SIZE, tile * M, slots - tokens
    params = load_head_params(head_params, head, H)
    token = row * tokens + start
    base = token * G + value_head
    q += (token * H + head) * K
    k += (row * slots * H + head) * K
    v += (row * slots * G + value_head) * V
    times += row * slots
    rank += row * slots
    at, block = start + tl.arange(0, M), start // BLOCK
    padded_tokens = query_blocks * BLOCK
    query_features += (row * H + head) * feature_count(SHARED) * padded_tokens
    key_features += (row * H + head) * feature_count(SHARED) * key_blocks * BLOCK
    query_block_times += row * query_blocks + block
    key_block_times += row * key_blocks
    query_ranks += row * query_blocks * 3
    key_ranks += row * key_blocks * 3
    score_offset = (row * G + value_head) * padded_tokens + at
    column = tl.arange(0, W)
    output_tile = load_rows(output + base * V, G * V, tokens - start, column, V, M)
    delta = tl.sum(
        output_tile * load_rows(grad_output + base * V, G * V, tokens - start, column, V, M).to(tl.float32), 1
    )
    max_score = tl.load(max_scores + score_offset)
    valid = max_score < -MIN_SCORE
    delta = tl.where(valid, delta, 0.0)
    tl.store(deltas + score_offset, delta)
    max_score, grad_precision = max_score[:, None], tl.zeros([M], tl.float32)
    if VARIANCE:
        offset, has_precision = (row * tokens + at) * H + head, valid & (value_head % GROUP_SIZE == 0)
        log_precision_tile = tl.load(log_precision + offset, mask=has_precision, other=0.0)
        grad_precision = tl.load(grad_log_precision + offset, mask=has_precision, other=0.0)
        grad_precision = grad_precision * tl.exp2(-LOG2E * log_precision_tile)
    query = load_rows(q, H * K, tokens - start, tl.arange(0, P), K, M)
    grad_outputs = load_rows(grad_output + base * V, G * V, tokens - start, column, V, M)
    query_tokens = load_tokens(query_features, times, rank, at, past_length, padded_tokens, slots, 1, SHARED)
    grad_query, zeros = tl.zeros([M, P], tl.float32), tl.zeros([M, PARTIAL_SUMS], tl.float32)
    grad_norm, sums = zeros, (zeros, zeros, (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros))
    begin, stop, near_start = 0, slots, 0
    if CAUSAL:
        stop, near_start = tl.minimum(past_length + start + M, slots), (past_length + block * BLOCK) // BLOCK * BLOCK
    high, low = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if MASKED:
        high, low = load_block_ranks(query_ranks, block)
        first_block, stop_block = visible_block_range(key_ranks, query_ranks, block, key_blocks, window, False, CAUSAL)
        begin, stop = first_block * BLOCK, tl.minimum(stop, stop_block * BLOCK)
    NEAR_N: tl.constexpr = N // 2 if N > 16 else N
    rest = delta
    if not RATIONAL:
        row_sum = tl.zeros([M], tl.float32)
        rest_sums = row_sum, row_sum, row_sum
        if CAUSAL:
            for first in tl.range(begin, near_start, N):
                block_lags = lag_between_blocks(
                    query_block_times, key_block_times + first // BLOCK, params, SHARED, PTX
                )
                rest_sums = add_other_keys(
                    rest_sums, query, grad_outputs, query_tokens, max_score, delta[:, None], k, v, times, rank,
                    key_features, block_lags, key_ranks, first, high, low, slots, key_blocks, window, H, G, params, K,
                    P, V, W, BLOCK, N, SHARED, RATIONAL, CAUSAL, MASKED, False, PRECISION, PTX,
                )  # fmt: skip
        for first in tl.range(tl.maximum(begin, near_start), stop, NEAR_N):
            rest_sums = add_other_keys(
                rest_sums, query, grad_outputs, query_tokens, max_score, delta[:, None], k, v, times, rank,
                key_features, None, key_ranks, first, high, low, slots, key_blocks, window, H, G, params, K, P, V, W,
                BLOCK, NEAR_N, SHARED, RATIONAL, CAUSAL, MASKED, True, PRECISION, PTX,
            )  # fmt: skip
        rest = tl.where(valid & (rest_sums[1] < DOMINANCE * rest_sums[2]), rest_sums[0], float("nan"))
        tl.store(rests + score_offset, rest)
    if CAUSAL:
        for first in tl.range(begin, near_start, N, num_stages=STAGES):
            block_lags = lag_between_blocks(query_block_times, key_block_times + first // BLOCK, params, SHARED, PTX)
            grad_query, grad_norm, sums = accumulate_query_grads(
                grad_query, grad_norm, sums, query, grad_outputs, query_tokens, max_score, delta[:, None],
                rest[:, None], grad_precision[:, None], k, v, times, rank, key_features, block_lags, key_ranks, first,
                high, low, slots, key_blocks, window, H, G, params, K, P, V, W, BLOCK, N, SHARED, RATIONAL, CAUSAL,
                MASKED, VARIANCE, False, PRECISION, PTX,
            )  # fmt: skip
    for first in tl.range(tl.maximum(begin, near_start), stop, NEAR_N, num_stages=2):
        grad_query, grad_norm, sums = accumulate_query_grads(
            grad_query, grad_norm, sums, query, grad_outputs, query_tokens, max_score, delta[:, None], rest[:, None],
            grad_precision[:, None], k, v, times, rank, key_features, None, key_ranks, first, high, low, slots,
            key_blocks, window, H, G, params, K, P, V, W, BLOCK, NEAR_N, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE,
            True, PRECISION, PTX,
        )  # fmt: skip
    reloaded = load_rows(q, H * K, tokens - start, tl.arange(0, P), K, M).to(tl.float32)
    grad_query = params[2] * (grad_query + sum_to_column(grad_norm) * reloaded)
    store_rows(grad_q + base * K, G * K, tokens - start, tl.arange(0, P), grad_query, K, M)
    grad_head_params += (row * tl.num_programs(0) + tile) * NUM_PARAMS * G + value_head
    nu, temperature, noises = sums
    for i in tl.static_range(8):
        tl.store(grad_head_params + i * G, sum_all(noises[i]))
    tl.store(grad_head_params + 8 * G, -0.5 * params[2] * params[2] * sum_all(nu))
    tl.store(grad_head_params + 9 * G, -LN2 / params[3] * sum_all(temperature))
    tl.store(grad_head_params + 10 * G, sum_all(noises[8]))


@triton.jit
def accumulate_key_grads(
    grad_k, grad_v, grad_norm, sums, key, value, key_tokens, q, grad_output, max_scores, deltas, rests, log_precision,
    grad_log_precision, times, rank, query_features, block_lags, query_ranks, first, high, low, past_length, tokens,
    slots, query_blocks, window, H, G, first_of_group, params,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries, which begins at token `first`, to the gradients of keys, values, norms of keys, and the
    state of keys at the end of their block."""
    first = tl.multiple_of(first, M)
    token = tl.cast(first, tl.int64)
    query = load_rows(q + token * H * K, H * K, tokens - first, tl.arange(0, P), K, M)
    grad_outputs = load_rows(grad_output + token * G * V, G * V, tokens - first, tl.arange(0, W), V, M)
    qk, grad_weights = matmul(key, tl.trans(query), PRECISION), matmul(value, tl.trans(grad_outputs), PRECISION)
    block, unmasked, at = first // BLOCK, False, first + tl.arange(0, M)
    query_tokens = load_tokens(query_features, times, rank, at, past_length, query_blocks * BLOCK, slots, 0, SHARED)
    max_score, delta = tl.load(max_scores + at), tl.load(deltas + at)[None, :]
    valid, max_score = max_score < -MIN_SCORE, max_score[None, :]
    grad_precision, rest = max_score, delta
    if not RATIONAL:
        rest = tl.load(rests + at)[None, :]
    if VARIANCE:
        log_precision_tile = tl.load(log_precision + at * H, mask=valid, other=0.0)
        grad_log_precision_tile = tl.load(grad_log_precision + at * H, mask=valid, other=0.0) * first_of_group
        grad_precision = (grad_log_precision_tile * tl.exp2(-LOG2E * log_precision_tile))[None, :]
    if MASKED:
        high_0, low_0 = load_block_ranks(query_ranks, block)
        unmasked = all_visible(high_0, low_0, high, low, window, CAUSAL)
    decayed, grads, _residual, _temperature, _grad_decayed, _key_var, key_lag, value_lag, _future = score_gradients(
        qk, grad_weights, value, query_tokens, key_tokens, block_lags, params, max_score, delta, rest, grad_precision,
        unmasked, slots, window, DIRECT, False, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE, PTX,
    )  # fmt: skip
    # Never true. It makes the compiler finish both sums first: else ptxas waits for each part of two open sums.
    if first < 0:
        grad_v, grad_k = grad_v * 0.0, grad_k * 0.0
    grad_v = matmul(decayed.to(value.dtype), grad_outputs, PRECISION, grad_v)
    grad_k = matmul(grads[0].to(key.dtype), query, PRECISION, grad_k)
    if not DIRECT:
        sums = add_key_side_grads(sums, grads, query_tokens, key_lag, value_lag, SHARED, VARIANCE)
    return grad_k, grad_v, grad_norm + partial_sums(grads[2]), sums


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_grads_kernel(
    q, k, v, times, rank, query_features, query_block_times, query_ranks, key_features, key_block_times, key_ranks,
    head_params, grad_output, max_scores, deltas, rests, log_precision, grad_log_precision, grad_k, grad_v,
    grad_head_params,
    tokens, slots, query_blocks, key_blocks, window, H, G, GROUP_SIZE,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    VARIANCE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values of one row and value head, and of parameters through the state
    of keys at the end of their block; tiles with most queries start first."""
    start, value_head, row = tl.program_id(0) * N, tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, past_length, token = value_head // GROUP_SIZE, slots - tokens, row * slots + start
    params = load_head_params(head_params, head, H)
    q += (row * tokens * H + head) * K
    grad_output += (row * tokens * G + value_head) * V
    k += (token * H + head) * K
    v += (token * G + value_head) * V
    times += row * slots
    rank += row * slots
    at, block, padded_tokens = start + tl.arange(0, N), start // BLOCK, query_blocks * BLOCK
    query_features += (row * H + head) * feature_count(SHARED) * padded_tokens
    key_features += (row * H + head) * feature_count(SHARED) * key_blocks * BLOCK
    query_block_times += row * query_blocks
    key_block_times += row * key_blocks + block
    query_ranks += row * query_blocks * 3
    key_ranks += row * key_blocks * 3
    max_scores += (row * G + value_head) * padded_tokens
    deltas += (row * G + value_head) * padded_tokens
    rests += (row * G + value_head) * padded_tokens
    log_precision += row * tokens * H + head
    grad_log_precision += row * tokens * H + head
    first_of_group = tl.where(value_head % GROUP_SIZE == 0, 1.0, 0.0)
    key = load_rows(k, H * K, slots - start, tl.arange(0, P), K, N)
    value = load_rows(v, G * V, slots - start, tl.arange(0, W), V, N)
    key_tokens = load_tokens(key_features, times, rank, at, 0, key_blocks * BLOCK, slots, 1, SHARED)
    grad_key, grad_value = tl.zeros([N, P], tl.float32), tl.zeros([N, W], tl.float32)
    grad_norm = tl.zeros([N, PARTIAL_SUMS], tl.float32)
    begin, stop, far_start = 0, tokens, tokens
    if CAUSAL:
        begin = tl.maximum(start - past_length, 0) // M * M
        far_start = tl.maximum(tl.cdiv((block + 1) * BLOCK - past_length, BLOCK), 0) * BLOCK
    high, low = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if MASKED:
        high, low = load_block_ranks(key_ranks, block)
        first_block, stop_block = visible_block_range(query_ranks, key_ranks, block, query_blocks, window, True, CAUSAL)
        begin, stop = tl.maximum(begin, first_block * BLOCK), tl.minimum(stop, stop_block * BLOCK)
    NEAR_N: tl.constexpr = M // 2 if M > 16 else M
    sums, grad_log_decay = (grad_norm, grad_norm, grad_norm, grad_norm), tl.zeros([N, 1], tl.float32)
    if CAUSAL:
        for first in tl.range(tl.maximum(begin, far_start), stop, M, num_stages=STAGES):
            block_lags = lag_between_blocks(query_block_times + first // BLOCK, key_block_times, params, SHARED, PTX)
            grad_key, grad_value, grad_norm, sums = accumulate_key_grads(
                grad_key, grad_value, grad_norm, sums, key, value, key_tokens, q, grad_output, max_scores, deltas,
                rests, log_precision, grad_log_precision, times, rank, query_features, block_lags, query_ranks, first,
                high, low, past_length, tokens, slots, query_blocks, window, H, G, first_of_group, params, K, P, V, W,
                BLOCK, M, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE, False, PRECISION, PTX,
            )  # fmt: skip
        grad_log_decay = tl.sum(grad_value * value.to(tl.float32), 1)[:, None]
    grad_decay, grad_key_state = sum_to_column(sums[0]), sum_to_column(sums[1])
    grad_value_state, grad_precision_state = sum_to_column(sums[2]), sum_to_column(sums[3])
    reloaded_tokens = load_tokens(key_features, times, rank, at, 0, key_blocks * BLOCK, slots, 1, SHARED)
    rate, process, key_noise = key_side_noise_grads(
        reloaded_tokens[1], params[0], grad_key_state, grad_key_state, params[2] * grad_decay,
        grad_log_decay if SHARED else 0.0,
    )  # fmt: skip
    value_rate, value_process, value_key_noise = 0.0, 0.0, 0.0
    if not SHARED:
        value_rate, value_process, value_key_noise = key_side_noise_grads(
            reloaded_tokens[2], params[1], grad_value_state, grad_precision_state, 0.0, grad_log_decay
        )
    grad_head_params += (row * tl.num_programs(0) + tl.program_id(0)) * NUM_PARAMS * G + value_head
    for i in tl.static_range(NUM_PARAMS):
        tl.store(
            grad_head_params + i * G,
            (rate, process, key_noise, 0.0, value_rate, value_process, value_key_noise, 0.0, 0.0, 0.0, 0.0)[i],
        )
    for first in tl.range(begin, tl.minimum(far_start, stop), NEAR_N, num_stages=2):
        grad_key, grad_value, grad_norm, _sums = accumulate_key_grads(
            grad_key, grad_value, grad_norm, sums, key, value, key_tokens, q, grad_output, max_scores, deltas, rests,
            log_precision, grad_log_precision, times, rank, query_features, None, query_ranks, first, high, low,
            past_length, tokens, slots, query_blocks, window, H, G, first_of_group, params, K, P, V, W, BLOCK, NEAR_N,
            SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE, True, PRECISION, PTX,
        )  # fmt: skip
    reloaded = load_rows(k, H * K, slots - start, tl.arange(0, P), K, N).to(tl.float32)
    grad_key = params[2] * (grad_key + sum_to_column(grad_norm) * reloaded)
    store_rows(grad_k + (token * G + value_head) * K, G * K, slots - start, tl.arange(0, P), grad_key, K, N)
    store_rows(grad_v + (token * G + value_head) * V, G * V, slots - start, tl.arange(0, W), grad_value, V, N)


def backward(
    grad_mean: Tensor, grad_log_precision: Tensor, saved: list[Tensor], frequency: Tensor, value_frequency: Tensor,
    times: Tensor, rank: Tensor, head_params: Tensor, config: ScoreConfig, masked: bool, variance: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k and v, in `dtype`, of both frequencies and of the parameters of heads."""
    log_precision, output, q, k, v, max_scores, weight_sums, *blocks = saved
    times, rank, head_params, grad_log_precision = (
        x.contiguous() for x in (times, rank, head_params, grad_log_precision)
    )
    launch = launch_shape(q, k, v, config, masked, variance)
    (count, tokens, heads, width), (_, slots, value_heads, slice_width) = q.shape, v.shape
    value_width = grad_mean.shape[3]
    slices = value_heads // grad_mean.shape[2]

    def join_slices(x: Tensor) -> Tensor:
        return x if slices == 1 else x.unflatten(2, (-1, slices)).flatten(3)[..., :value_width]

    qk_frequency_grads = frequency_grad_buffers(q, k)
    value_frequency_grads = frequency_grad_buffers(grad_mean, join_slices(v))
    grad_output = rotate_backward(
        grad_mean, join_slices(output), times, rank, value_frequency, True, masked, v.dtype, value_frequency_grads[0],
        weight_sums if slices == 1 else weight_sums[:, ::slices].contiguous(),
    )  # fmt: skip
    grad_output = split_slices(grad_output, slices, slice_width)
    float32 = {"dtype": torch.float32, "device": q.device}
    query_tiles, key_tiles = (
        rule(launch.compiled, q.dtype, shared_memory(q.device)) for rule in (query_grad_tiles, key_grad_tiles)
    )
    num_query_tiles, num_key_tiles = -(-tokens // query_tiles["M"]), -(-slots // key_tiles["N"])
    grad_q, grad_k = (torch.empty(count, n, value_heads, width, **float32) for n in (tokens, slots))
    grad_v = torch.empty(v.shape, **float32)
    grad_head_params = torch.empty(count * (num_query_tiles + num_key_tiles), NUM_PARAMS.value, value_heads, **float32)
    deltas = torch.empty_like(max_scores)
    rests = deltas if config.rational else torch.empty_like(max_scores)
    args = (q, k, v, times, rank, *blocks, head_params)
    row_sums = (max_scores, deltas, rests, log_precision, grad_log_precision)
    Launch(query_grads_kernel, (num_query_tiles, *launch.grid), (
        *args, output, grad_output, *row_sums, grad_q, grad_head_params, *launch.sizes,
    ), launch.compiled | query_tiles).run()  # fmt: skip
    Launch(key_grads_kernel, (num_key_tiles, *launch.grid), (
        *args, grad_output, *row_sums, grad_k, grad_v, grad_head_params[count * num_query_tiles :], *launch.sizes,
    ), launch.compiled | key_tiles).run()  # fmt: skip
    if value_heads != heads:
        grad_q, grad_k = (x.unflatten(2, (heads, -1)).sum(3) for x in (grad_q, grad_k))
    options = (False, masked, dtype)
    grad_q = rotate_backward(grad_q, q, times, rank, frequency, *options, qk_frequency_grads[0])
    grad_k = rotate_backward(grad_k, k, times, rank, frequency, *options, qk_frequency_grads[1])
    grad_v = rotate_backward(
        join_slices(grad_v), join_slices(v), times, rank, value_frequency, *options, value_frequency_grads[1]
    )
    grad_head_params = grad_head_params.unflatten(2, (heads, -1)).sum((0, 3))
    return (
        grad_q, grad_k, grad_v, sum_frequency_grads(qk_frequency_grads[2], frequency),
        sum_frequency_grads(value_frequency_grads[2], value_frequency), grad_head_params,
    )  # fmt: skip
