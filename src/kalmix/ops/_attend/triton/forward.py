"""Forward pass of `attend` in Triton: online softmax as in flash attention, with scores from lags and residuals.

A token that is not finite is set to 0, and its norm to NaN: so it affects only the scores of queries that attend to it,
and these return NaN. The backward pass ignores such queries.

A program handles one tile of queries. It loops over whole blocks of keys before the block of the queries, whose lags
are combined from those of tokens (see `triton.scores`), then over the keys next to the queries. Blocks that the mask
hides are skipped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from kalmix.ops._attend.block_sizes import block_size, split_value_width
from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._attend.triton.block_masks import (
    EMPTY_RANK,
    UNSPECIALIZED,
    all_visible,
    feature_count,
    lag_between_blocks,
    load_block_ranks,
    load_tokens,
    mask_scores,
    pair_variances,
    prepare_token_blocks,
    visible_block_range,
)
from kalmix.ops._attend.triton.rotary import rotate
from kalmix.ops._attend.triton.scores import LN2, LOG2E, load_head_params, score_terms, token_precisions
from kalmix.ops._attend.triton.tile_sizes import forward_tiles
from kalmix.ops._shared.gpu import shared_memory
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx
from kalmix.ops._shared.triton.tiles import dot_precision, load_rows, matmul, store_rows

MIN_SCORE = tl.constexpr(-3e38)  # smaller than every score


@triton.jit
def decay_weights(weight, score, value_var, value_lag, future, params, CAUSAL: tl.constexpr):
    """Return weight * decay of the value. For later keys the decay exceeds 1 and is added to the exponent instead."""
    if CAUSAL:
        decayed = weight * value_var[0]
    else:
        log_decay = LOG2E * params[1][0] * value_lag[0]
        decayed = tl.exp2(score + tl.where(future, log_decay, -log_decay))
    return decayed


@triton.jit
def accumulate_keys(
    output, weight_sum, max_score, precision_sum, query, query_tokens, k, v, times, rank, key_features, block_lags,
    key_ranks, first, high, low, slots, key_blocks, window, H, G, params,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys, which begins at slot `first`, to the accumulators of a tile of queries.

    Weights are 2^(score - max_score) with integer `max_score`. So the mantissa of a weight does not depend on the
    maximum, and the backward pass, which uses the final maximum, rounds decayed weights exactly as this pass did.
    """
    first = tl.multiple_of(first, N)
    token = tl.cast(first, tl.int64)
    count = slots - first if DIRECT else N  # blocks before the last one are full
    key = load_rows(k + token * H * K, H * K, count, tl.arange(0, P), K, N)
    qk = matmul(query, tl.trans(key), PRECISION)
    block = first // BLOCK
    key_tokens = load_tokens(
        key_features, times, rank, first + tl.arange(0, N), 0, key_blocks * BLOCK, slots, 0, SHARED
    )
    key_var, value_var, _key_lag, value_lag, future = pair_variances(
        query_tokens, key_tokens, block_lags, params, DIRECT, True, CAUSAL, SHARED, PTX
    )
    terms = score_terms(
        qk, query_tokens[0], key_tokens[0], key_var, value_var, future, value_lag[0], params, SHARED, RATIONAL, CAUSAL,
        PTX,
    )  # fmt: skip
    unmasked = False
    if MASKED:
        high_0, low_0 = load_block_ranks(key_ranks, block)
        unmasked = all_visible(high, low, high_0, low_0, window, CAUSAL)
    cost = mask_scores(
        terms[0], float("inf"), query_tokens, key_tokens, unmasked, slots, window, DIRECT, MASKED, CAUSAL
    )
    previous_max, max_score = max_score, tl.maximum(max_score, tl.ceil(params[3] * tl.min(cost, 1)))
    score = params[3] * cost - max_score[:, None]
    weight, rescale = tl.exp2(score), tl.exp2(previous_max - max_score)
    weight_sum = weight_sum * rescale + tl.sum(weight, 1)
    value = load_rows(v + token * G * V, G * V, count, tl.arange(0, W), V, N)
    decayed = decay_weights(weight, score, value_var, value_lag, future, params, CAUSAL)
    output = matmul(decayed.to(value.dtype), value, PRECISION, output * rescale[:, None])
    if VARIANCE:
        precisions = token_precisions(terms, key_var, value_var, future, params, RATIONAL, CAUSAL, PTX)
        precision_sum += tl.sum(tl.where(score > float("-inf"), precisions, 0.0), 1)
    return output, weight_sum, max_score, precision_sum


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attend_kernel(
    q, k, v, times, rank, query_features, query_block_times, query_ranks, key_features, key_block_times, key_ranks,
    head_params, output_ptr, max_scores, weight_sums, log_precision, tokens, slots, query_blocks, key_blocks, window, H,
    G, GROUP_SIZE,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    VARIANCE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the output of one tile of queries of one row and value head; tiles with most keys start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    value_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, start, past_length = value_head // GROUP_SIZE, tile * M, slots - tokens
    params = load_head_params(head_params, head, H)
    base = (row * tokens + start) * G + value_head
    q += ((row * tokens + start) * H + head) * K
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
    query = load_rows(q, H * K, tokens - start, tl.arange(0, P), K, M)
    query_tokens = load_tokens(query_features, times, rank, at, past_length, padded_tokens, slots, 1, SHARED)
    output, precision_sum = tl.zeros([M, W], tl.float32), tl.zeros([M], tl.float32)
    weight_sum, max_score = tl.zeros([M], tl.float32), tl.full([M], MIN_SCORE, tl.float32)
    begin, stop, near_start = 0, slots, 0
    if CAUSAL:
        stop, near_start = tl.minimum(past_length + start + M, slots), (past_length + block * BLOCK) // BLOCK * BLOCK
    high, low = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if MASKED:
        high, low = load_block_ranks(query_ranks, block)
        first_block, stop_block = visible_block_range(key_ranks, query_ranks, block, key_blocks, window, False, CAUSAL)
        begin, stop = first_block * BLOCK, tl.minimum(stop, stop_block * BLOCK)
    NEAR_N: tl.constexpr = N // 2 if N > 16 else N  # lags per pair need more registers
    if CAUSAL:
        block_lags = lag_between_blocks(
            query_block_times, key_block_times + tl.minimum(begin // BLOCK, key_blocks - 1), params, SHARED, PTX
        )
        for first in tl.range(begin, near_start, N, num_stages=STAGES):
            output, weight_sum, max_score, precision_sum = accumulate_keys(
                output, weight_sum, max_score, precision_sum, query, query_tokens, k, v, times, rank, key_features,
                block_lags, key_ranks, first, high, low, slots, key_blocks, window, H, G, params, K, P, V, W, BLOCK, N,
                SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE, False, PRECISION, PTX,
            )  # fmt: skip
            # Loaded one tile ahead, to hide its latency.
            block_lags = lag_between_blocks(
                query_block_times, key_block_times + (first + N) // BLOCK, params, SHARED, PTX
            )
    for first in tl.range(tl.maximum(begin, near_start), stop, NEAR_N, num_stages=2):
        output, weight_sum, max_score, precision_sum = accumulate_keys(
            output, weight_sum, max_score, precision_sum, query, query_tokens, k, v, times, rank, key_features, None,
            key_ranks, first, high, low, slots, key_blocks, window, H, G, params, K, P, V, W, BLOCK, NEAR_N, SHARED,
            RATIONAL, CAUSAL, MASKED, VARIANCE, True, PRECISION, PTX,
        )  # fmt: skip
    has_output = at < tokens
    if MASKED:
        has_output = tl.load(rank + past_length + at, mask=has_output, other=EMPTY_RANK) > EMPTY_RANK
        output = tl.where(has_output[:, None], output, 0.0)
    weight_sum = tl.where(has_output, weight_sum, 1.0)
    # Not finite if a query attends to NaN; the stored maximum then makes all its weights 0 in the backward pass.
    finite = weight_sum == weight_sum
    store_rows(output_ptr + base * V, G * V, tokens - start, tl.arange(0, W), output / weight_sum[:, None], V, M)
    offset = (row * G + value_head) * padded_tokens + at
    tl.store(max_scores + offset, tl.where(has_output & finite, max_score, -MIN_SCORE))
    tl.store(weight_sums + offset, weight_sum)
    if VARIANCE:
        offset = (row * tokens + at) * H + head
        log_precision_tile = LN2 * tl.log2(tl.where(has_output, precision_sum, 1.0))
        log_precision_tile = tl.where(finite, log_precision_tile, weight_sum)
        if MASKED:
            log_precision_tile = tl.where(has_output, log_precision_tile, float("inf"))  # variance 0
        tl.store(log_precision + offset, log_precision_tile, mask=(at < tokens) & (value_head % GROUP_SIZE == 0))


class LaunchShape(NamedTuple):
    """Launch parameters that the kernels of a call share.

    Attributes:
        grid: dims of the grid after the tiles: value heads and rows.
        sizes: integer arguments after a kernel's tensors.
        compiled: constexpr arguments.
    """

    grid: tuple[int, int]
    sizes: tuple[int, ...]
    compiled: dict[str, Any]


def launch_shape(q: Tensor, k: Tensor, v: Tensor, config: ScoreConfig, masked: bool, variance: bool) -> LaunchShape:
    """Return the launch parameters for rotated q, k and v."""
    (count, tokens, heads, width), (_, slots, value_heads, value_width) = q.shape, v.shape
    block = block_size(slots)
    blocks = (-(-tokens // block), -(-slots // block))
    sizes = (tokens, slots, *blocks, config.window, heads, value_heads, value_heads // heads)
    compiled = {
        "K": width, "P": max(16, 1 << (width - 1).bit_length()),
        "V": value_width, "W": max(16, 1 << (value_width - 1).bit_length()),
        "BLOCK": block, "SHARED": config.shared_dynamics, "RATIONAL": config.rational, "CAUSAL": config.causal,
        "MASKED": masked, "VARIANCE": variance, "PRECISION": dot_precision(k.dtype), "PTX": supports_ptx(),
    }  # fmt: skip
    return LaunchShape((value_heads, count), sizes, compiled)


def split_slices(x: Tensor, slices: int, width: int) -> Tensor:
    """Split rows `[R, T, G, V]` in slices `[R, T, G slices, width]`, padded with zeros."""
    if slices == 1:
        return x
    return pad(x, (0, slices * width - x.shape[3])).unflatten(3, (slices, width)).flatten(2, 3)


def forward(
    q: Tensor, k: Tensor, v: Tensor, frequency: Tensor, value_frequency: Tensor, times: Tensor, rank: Tensor,
    head_params: Tensor, config: ScoreConfig, masked: bool, variance: bool, copy_kv: bool, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the forward pass.

    Returns:
        The mean, the logarithm of the precision, keys and values in float32 if `copy_kv`, and the tensors for the
        backward pass: the output before its rotation, float32; rotated q, k and v in `dtype` (output and v in slices);
        maximum scores and sums of weights; `TokenBlocks` of queries and of keys.
    """
    float32 = {"dtype": torch.float32, "device": k.device}
    copies = [torch.empty(x.shape if copy_kv else (0,), **float32) for x in (k, v)]
    times, rank, head_params = (x.contiguous() for x in (times, rank, head_params))
    block, slices, width = block_size(k.shape[1]), *split_value_width(v.shape[3], dtype)
    queries, keys = prepare_token_blocks(q, times, rank, head_params, block, config.shared_dynamics)
    options = (False, masked, dtype)
    q = rotate(q, times, rank, frequency, *options, queries.norms, nonfinite_mode=1)
    k = rotate(k, times, rank, frequency, *options, keys.norms, copies[0], nonfinite_mode=1)
    value = rotate(v, times, rank, value_frequency, *options, keys.norms, copies[1], nonfinite_mode=2)
    value = split_slices(value, slices, width)
    launch = launch_shape(q, k, value, config, masked, variance)
    tokens, padded_tokens = q.shape[1], queries.features.shape[3]
    output = torch.empty(*q.shape[:2], *value.shape[2:], **float32)
    max_scores, weight_sums = (torch.empty(*launch.grid[::-1], padded_tokens, **float32) for _ in range(2))
    log_precision = torch.empty(q.shape[:3] if variance else (0,), **float32)
    tile = forward_tiles(launch.compiled, dtype, shared_memory(k.device))
    args = (
        q, k, value, times, rank, *queries, *keys, head_params, output, max_scores, weight_sums, log_precision,
        *launch.sizes,
    )  # fmt: skip
    Launch(attend_kernel, (-(-tokens // tile["M"]), *launch.grid), args, launch.compiled | tile).run()
    joined = output if slices == 1 else output.unflatten(2, (-1, slices)).flatten(3)[..., : v.shape[3]]
    mean = rotate(joined, times, rank, value_frequency, True, False, v.dtype)
    return mean, log_precision, *copies, output, q, k, value, max_scores, weight_sums, *queries, *keys
