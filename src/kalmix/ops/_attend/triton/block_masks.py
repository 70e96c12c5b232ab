"""Blocks of queries and keys: their lags, ranks and masks, as Triton functions.

Each block of keys has the time of its last token, each block of queries that of its first. Both lie between a key and
a query that attends to it from a later block. `token_blocks_kernel` stores the lag of each token to the time of its
block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._attend import kv_layout
from kalmix.ops._attend.block_sizes import num_token_features
from kalmix.ops._attend.triton.scores import (
    TINY,
    chained_variances,
    lag_terms,
    lag_variances,
    load_head_params,
    time_difference,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx

EMPTY_RANK = tl.constexpr(kv_layout.EMPTY_RANK)
OUTSIDE_RANK = tl.constexpr(2 * kv_layout.EMPTY_RANK)  # rank of padding, which no query attends to
BLOCKS_PER_STEP = tl.constexpr(128)  # blocks whose ranks are loaded together
# Integer arguments whose values do not trigger recompilation.
UNSPECIALIZED = ["tokens", "slots", "query_blocks", "key_blocks", "window", "H", "G"]


class TokenBlocks(NamedTuple):
    """Precomputed features of queries, or of keys, in blocks.

    Attributes:
        features: float32 `[R, H, features, tokens]`, with tokens padded to whole blocks. Each token has half its
            squared norm; its lag to the time of its block; decay, kappa and derivative of kappa over that lag; and a
            variance: of a key after the lag, of a query before it. The last four are there again for values with their
            own dynamics.
        block_times: float64 `[R * blocks + 1]`, time of each block of each row, then 0: see `tokens_per_block`.
        ranks: int64 `[R * blocks * 3]`, minimum and maximum rank of each block of each row, and the minimum without
            empty slots, which exceeds the maximum if all slots are empty.
    """

    features: Tensor
    block_times: Tensor
    ranks: Tensor

    @property
    def norms(self) -> Tensor:
        """Half the squared norms of tokens, `[R, H, tokens]`."""
        return self.features[:, :, 0]


feature_count = triton.constexpr_function(num_token_features)


@triton.jit
def store_lag_features(features, padded_tokens, lag, noise, is_key, PTX: tl.constexpr):
    """Store the features that follow the lag."""
    rate, process, key, query = noise
    _lag, decay, accumulated, slope = lag_terms(rate, lag, PTX)
    tl.store(features, decay)
    tl.store(features + padded_tokens, accumulated)
    tl.store(features + 2 * padded_tokens, slope)
    tl.store(
        features + 3 * padded_tokens,
        process * accumulated + tl.where(is_key, key * decay * decay, tl.maximum(query, TINY)),
    )


@triton.jit
def load_times(times, mask):
    """Load times, with 0 for non-finite ones: the lags of masked pairs must be finite, too."""
    time = tl.load(times, mask=mask, other=0.0)
    return tl.where(time - time == 0.0, time, 0.0)


@triton.jit(do_not_specialize=["tokens", "slots", "query_blocks", "key_blocks", "H"])
def token_blocks_kernel(
    times, rank, head_params, query_features, query_block_times, query_ranks, key_features, key_block_times, key_ranks,
    tokens, slots, query_blocks, key_blocks, H,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the features of one block of queries or of keys, of one row and head."""
    program, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    is_key = program >= query_blocks
    features, block_times = (
        tl.where(is_key, key_features, query_features), tl.where(is_key, key_block_times, query_block_times)
    )  # fmt: skip
    ranks, blocks = tl.where(is_key, key_ranks, query_ranks), tl.where(is_key, key_blocks, query_blocks)
    block = program - tl.where(is_key, query_blocks, 0)
    first, length = tl.where(is_key, 0, slots - tokens), tl.where(is_key, slots, tokens)
    start, t = block * BLOCK, tl.arange(0, BLOCK)
    count = length - start
    offsets = row * slots + first + start + t
    time = load_times(times + offsets, t < count)
    token_ranks = tl.load(rank + offsets, mask=t < count, other=OUTSIDE_RANK)
    occupied = token_ranks > EMPTY_RANK
    block_token = tl.where(is_key, tl.max(tl.where(occupied, t, -1), 0), tl.min(tl.where(occupied, t, BLOCK), 0))
    block_time = tl.sum(tl.where(t == block_token, time, 0.0), 0)
    lag = time_difference(block_time, time)
    lag = tl.where(occupied, tl.maximum(tl.where(is_key, lag, -lag), 0.0), 0.0)
    padded_tokens = blocks * BLOCK
    features += (row * H + head) * feature_count(SHARED) * padded_tokens + start + t
    tl.store(features, 0.0, mask=t >= count)  # norms of other tokens are stored by `rotate_kernel`
    tl.store(features + padded_tokens, lag)
    params = load_head_params(head_params, head, H)
    store_lag_features(features + 2 * padded_tokens, padded_tokens, lag, params[0], is_key, PTX)
    if not SHARED:
        store_lag_features(features + 6 * padded_tokens, padded_tokens, lag, params[1], is_key, PTX)
    if head == 0:
        tl.store(block_times + row * blocks + block, block_time)
        tl.store(block_times + tl.num_programs(2) * blocks, 0.0, mask=row + block == 0)
        ranks += (row * blocks + block) * 3
        # Padding lowers the minimum rank of a block of keys, so that its mask is applied; in queries it has no effect.
        tl.store(ranks, tl.min(tl.where((t < count) | is_key, token_ranks, -OUTSIDE_RANK), 0))
        tl.store(ranks + 1, tl.max(token_ranks, 0))
        tl.store(ranks + 2, tl.min(tl.where(occupied, token_ranks, -OUTSIDE_RANK), 0))


def prepare_token_blocks(
    q: Tensor, times: Tensor, rank: Tensor, head_params: Tensor, block: int, shared: bool
) -> tuple[TokenBlocks, TokenBlocks]:
    """Compute the features of q `[R, T, H, K]` and of keys; `times` and `rank` are `[R, S]`, the last T of queries.

    Norms are left for `rotate` to write.
    """
    (count, tokens, heads), slots, rows = q.shape[:3], times.shape[1], num_token_features(shared)
    query_blocks, key_blocks = -(-tokens // block), -(-slots // block)

    def empty(blocks: int) -> TokenBlocks:
        return TokenBlocks(
            torch.empty(count, heads, rows, blocks * block, dtype=torch.float32, device=q.device),
            torch.empty(count * blocks + 1, dtype=torch.float64, device=q.device),
            torch.empty(count * blocks * 3, dtype=torch.int64, device=q.device),
        )

    queries, keys = empty(query_blocks), empty(key_blocks)
    args = (times, rank, head_params, *queries, *keys, tokens, slots, query_blocks, key_blocks, heads)
    compiled = {"BLOCK": block, "SHARED": shared, "PTX": supports_ptx(), "num_warps": 4}
    Launch(token_blocks_kernel, (query_blocks + key_blocks, heads, count), args, compiled).run()
    return queries, keys


@triton.jit
def any_visible(high, low, high_0, low_0, window, CAUSAL: tl.constexpr):
    """Return whether a query with a rank in [low, high] may attend to a key with a rank in [low_0, high_0]."""
    return (high - low_0 > (-1 if CAUSAL else -window)) & (low - high_0 < window)


@triton.jit
def all_visible(high, low, high_0, low_0, window, CAUSAL: tl.constexpr):
    """Return whether all queries with ranks in [low, high] attend to all keys with ranks in [low_0, high_0]."""
    return (low - high_0 > (-1 if CAUSAL else -window)) & (high - low_0 < window)


@triton.jit
def load_block_ranks(ranks, block):
    """Load the maximum and the minimum rank of a block."""
    return tl.load(ranks + 3 * block + 1), tl.load(ranks + 3 * block)


@triton.jit
def visible_block_range(ranks, own_ranks, own_block, blocks, window, OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the first visible block and the last one plus 1, of queries if `OF_QUERIES`, else of keys.

    Empty slots do not count. `own_ranks` and `own_block` are those of the program: of keys if `OF_QUERIES`.
    """
    first, stop = blocks, 0
    high, low = tl.load(own_ranks + 3 * own_block + 1), tl.load(own_ranks + 3 * own_block + 2)
    for first_block in range(0, blocks, BLOCKS_PER_STEP):
        block = first_block + tl.arange(0, BLOCKS_PER_STEP)
        mask = block < blocks
        high_0 = tl.load(ranks + 3 * block + 1, mask=mask, other=0)
        low_0 = tl.load(ranks + 3 * block + 2, mask=mask, other=0)
        if OF_QUERIES:
            visible = mask & any_visible(high_0, low_0, high, low, window, CAUSAL)
        else:
            visible = mask & any_visible(high, low, high_0, low_0, window, CAUSAL)
        first = tl.minimum(first, tl.min(tl.where(visible, block, blocks), 0))
        stop = tl.maximum(stop, tl.max(tl.where(visible, block + 1, 0), 0))
    return first, stop


@triton.jit
def load_lag_features(features, at, padded_tokens, FIRST: tl.constexpr, AXIS: tl.constexpr):
    return (
        tl.expand_dims(tl.load(features + padded_tokens + at), AXIS),
        tl.expand_dims(tl.load(features + FIRST * padded_tokens + at), AXIS),
        tl.expand_dims(tl.load(features + (FIRST + 1) * padded_tokens + at), AXIS),
        tl.expand_dims(tl.load(features + (FIRST + 2) * padded_tokens + at), AXIS),
        tl.expand_dims(tl.load(features + (FIRST + 3) * padded_tokens + at), AXIS),
    )


@triton.jit
def load_tokens(features, times, rank, at, first, padded_tokens, slots, AXIS: tl.constexpr, SHARED: tl.constexpr):
    """Load the tokens at offsets `at`; the token at offset 0 has slot `first`.

    Returns norm, (lag, variance) by the dynamics of keys and by those of values, time, rank and slot.
    """
    key_lag = load_lag_features(features, at, padded_tokens, 2, AXIS)
    value_lag = key_lag
    if not SHARED:
        value_lag = load_lag_features(features, at, padded_tokens, 6, AXIS)
    slot = first + at
    time = load_times(times + slot, slot < slots)
    token_ranks = tl.load(rank + slot, mask=slot < slots, other=OUTSIDE_RANK)
    norm = tl.expand_dims(tl.load(features + at), AXIS)
    return (
        norm, key_lag, value_lag, tl.expand_dims(time, AXIS), tl.expand_dims(token_ranks, AXIS),
        tl.expand_dims(slot, AXIS),
    )  # fmt: skip


@triton.jit
def lag_between_blocks(start, end, params, SHARED: tl.constexpr, PTX: tl.constexpr):
    """Compute the lag from a block of keys to a block of queries, by the dynamics of keys and by those of values."""
    lag = tl.maximum(time_difference(tl.load(start), tl.load(end)), 0.0)
    key_lag = lag_terms(params[0][0], lag, PTX)
    value_lag = key_lag
    if not SHARED:
        value_lag = lag_terms(params[1][0], lag, PTX)
    return key_lag, value_lag


@triton.jit
def pair_variances(
    query, key, block_lags, params,
    DIRECT: tl.constexpr, QUERIES_FIRST: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute (decay, variances) of all pairs of a tile for keys and for values, two lags, and the mask of later keys.

    If `DIRECT`, lags are computed per pair. Otherwise they are combined from the lags of tokens and `block_lags`, and
    the returned lags are those of `chained_variances`.
    """
    key_noise, value_noise, _two_over_nu, _neg_temperature, _floor = params
    if DIRECT:
        signed_lag = time_difference(query[3], key[3])
        future, distance = signed_lag < 0, tl.maximum(signed_lag, 0.0) if CAUSAL else tl.abs(signed_lag)
        key_lag = lag_terms(key_noise[0], distance, PTX)
        state, total = lag_variances(key_lag, key_noise, future, CAUSAL)
        key_var = key_lag[1], state, total
        value_var, value_lag = key_var, key_lag
        if not SHARED:
            value_lag = lag_terms(value_noise[0], distance, PTX)
            state, total = lag_variances(value_lag, value_noise, future, CAUSAL)
            value_var = value_lag[1], state, total
    else:
        future = False
        key_var, key_lag = chained_variances(query[1], block_lags[0], key[1], key_noise, QUERIES_FIRST)
        value_var, value_lag = key_var, key_lag
        if not SHARED:
            value_var, value_lag = chained_variances(query[2], block_lags[1], key[2], value_noise, QUERIES_FIRST)
    return key_var, value_var, key_lag, value_lag, future


@triton.jit
def mask_scores(
    score, fill, query, key, unmasked, slots, window,
    DIRECT: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Replace the scores of masked pairs by `fill`; `unmasked` is true if no pair of the tile is masked."""
    if MASKED:
        if not unmasked:
            rank_difference = query[4] - key[4]
            score = tl.where((rank_difference > (-1 if CAUSAL else -window)) & (rank_difference < window), score, fill)
    elif DIRECT:
        visible = key[5] < slots
        if CAUSAL:
            visible = visible & (query[5] >= key[5])
        score = tl.where(visible, score, fill)
    return score
