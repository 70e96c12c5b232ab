"""Blocks of queries and of keys, in Triton: where they meet, who sees whom, and over which lags.

A block of keys is met at the time of its last token, a block of queries at that of its first: between tokens that see
each other, in different blocks, lie both. `survey` notes of every token its size and its lag to there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._attend import kv_layout as lanes
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

EMPTY_RANK = tl.constexpr(lanes.EMPTY_RANK)
OUTSIDE_RANK = tl.constexpr(2 * lanes.EMPTY_RANK)  # the rank of what is no slot: nothing sees it
BLOCKS_PER_STEP = tl.constexpr(128)  # looked through at once
UNSPECIALIZED = [
    "tokens",
    "slots",
    "query_blocks",
    "key_blocks",
    "window",
    "H",
    "G",
]  # numbers that must not compile anew


class TokenBlocks(NamedTuple):
    """What is known of queries, or keys, in blocks.

    Attributes:
        traits: float32 `[L, H, rows, tokens]`, padded to whole blocks: size, a lag as `after` has it, and the variance
            that is known of a token alone: of a key after its lag, of what a query is compared with before it; where
            values have dynamics of their own, the last four of theirs, too.
        met: float64 `[L, blocks]`, the time a block is met at.
        ranks: int64 `[L, blocks, 2]`, the least and the greatest rank in a block.
    """

    features: Tensor
    block_times: Tensor
    ranks: Tensor

    @property
    def blocks(self) -> int:
        return self.block_times.shape[1]

    @property
    def norms(self) -> Tensor:
        """Of tokens, `[L, H, tokens]`."""
        return self.features[:, :, 0]


feature_count = triton.constexpr_function(num_token_features)


@triton.jit
def store_lag_features(features, padded_tokens, lag, noise, is_key, PTX: tl.constexpr):
    """What follows the lag among the traits of tokens."""
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
    """Load times, 0 where they are not finite: lags stay finite, also those of pairs that are hidden."""
    time = tl.load(times, mask=mask, other=0.0)
    return tl.where(time - time == 0.0, time, 0.0)


@triton.jit(do_not_specialize=["tokens", "slots", "first", "blocks", "H", "for_keys"])
def token_blocks_kernel(
    times, rank, head_params, features, block_times, ranks, tokens, slots, first, blocks, H, for_keys,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A block of one lane and head, of keys, met at its last token, or of queries, met at its first."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, t, is_key = block * BLOCK, tl.arange(0, BLOCK), for_keys > 0
    count = tokens - start
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
    tl.store(features, 0.0, mask=t >= count)  # where there are tokens, what turns them notes it
    tl.store(features + padded_tokens, lag)
    params = load_head_params(head_params, head, H)
    store_lag_features(features + 2 * padded_tokens, padded_tokens, lag, params[0], is_key, PTX)
    if not SHARED:
        store_lag_features(features + 6 * padded_tokens, padded_tokens, lag, params[1], is_key, PTX)
    if head == 0:
        tl.store(block_times + row * blocks + block, block_time)
        ranks += (row * blocks + block) * 2
        # No query sees all of a block of keys that is not full; of queries those that are not there do not matter.
        tl.store(ranks, tl.min(tl.where((t < count) | is_key, token_ranks, -OUTSIDE_RANK), 0))
        tl.store(ranks + 1, tl.max(token_ranks, 0))


def prepare_token_blocks(
    x: Tensor, times: Tensor, rank: Tensor, head_params: Tensor, block: int, for_keys: bool, shared: bool
) -> TokenBlocks:
    """Of x `[L, tokens, H, K]`, whose tokens are the last of `times` and `rank`, `[L, S]`; sizes are left out."""
    count, tokens, heads = x.shape[:3]
    blocks, slots, rows = triton.cdiv(tokens, block), times.shape[1], num_token_features(shared)
    blocks_of_tokens = TokenBlocks(
        torch.empty(count, heads, rows, blocks * block, dtype=torch.float32, device=x.device),
        torch.empty(count, blocks, dtype=torch.float64, device=x.device),
        torch.empty(count, blocks, 2, dtype=torch.int64, device=x.device),
    )
    args = (times, rank, head_params, *blocks_of_tokens, tokens, slots, slots - tokens, blocks, heads, int(for_keys))
    compiled = {"BLOCK": block, "SHARED": shared, "PTX": supports_ptx(), "num_warps": 4}
    Launch(token_blocks_kernel, (blocks, heads, count), args, compiled).run()
    return blocks_of_tokens


@triton.jit
def any_visible(high, low, high_0, low_0, window, CAUSAL: tl.constexpr):
    """Whether some query with a rank from `low` to `high` may see some key with one from `low_0` to `high_0`."""
    return (high - low_0 > (-1 if CAUSAL else -window)) & (low - high_0 < window)


@triton.jit
def all_visible(high, low, high_0, low_0, window, CAUSAL: tl.constexpr):
    """Whether all such queries see all such keys."""
    return (low - high_0 > (-1 if CAUSAL else -window)) & (high - low_0 < window)


@triton.jit
def load_block_ranks(ranks, block):
    return tl.load(ranks + 2 * block + 1), tl.load(ranks + 2 * block)


@triton.jit
def visible_block_range(ranks, high, low, blocks, window, OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr):
    """From which to before which block something may be seen; `ASKS` if those blocks are of queries."""
    first, stop = blocks, 0
    for first_block in range(0, blocks, BLOCKS_PER_STEP):
        block = first_block + tl.arange(0, BLOCKS_PER_STEP)
        mask = block < blocks
        low_0 = tl.load(ranks + 2 * block, mask=mask, other=0)
        high_0 = tl.load(ranks + 2 * block + 1, mask=mask, other=0)
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
    """Size, lag and variance, these as values have them, time, rank and slot of the tokens at `at`; the first token has
    slot `first`."""
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
    """The lag from the end of a block of keys to the start of one of queries, as keys have it and as values."""
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
    """What lies between the tokens of a tile's pairs, for keys and for values: (decay, variances) and a lag, of the
    pairs or as `through` has it; and which pairs are ahead.

    Directly, or through where their blocks are met, between which lies `way`.
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
    """Scores, or `unseen` where the key is not seen; `whole` says that all are."""
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
