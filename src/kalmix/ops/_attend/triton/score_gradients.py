"""Gradients of a tile of pairs through its scores, as Triton functions.

For each query the gradients of its scores sum to 0. If one key has nearly all weight, the gradient of its score is a
difference that cancels up to rounding. Exponential weights may multiply it by a residual of thousands of variances. So
with them, that gradient is minus the sum for all other keys, which `add_other_keys` computes in a pass before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._attend.triton.block_masks import (
    all_visible,
    load_block_ranks,
    load_tokens,
    mask_scores,
    pair_variances,
)
from kalmix.ops._attend.triton.forward import decay_weights
from kalmix.ops._attend.triton.scores import score_terms, score_vjp, token_precisions
from kalmix.ops._shared.triton.ptx import round_like
from kalmix.ops._shared.triton.tiles import load_rows, matmul

DOMINANCE = tl.constexpr(1.25)  # a key has nearly all weight if the sum of weights is below this times its weight
HEAVY = tl.constexpr(0.375)  # then its weight, of 0.5 to 1, is above this, and other weights are below 0.25


@triton.jit
def load_key_tile(
    query, grad_outputs, k, v, times, rank, key_features, key_ranks, first, high, low, slots, key_blocks, window, H, G,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    SHARED: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Load the tile of keys and values that begins at slot `first`.

    Returns the keys, their products with queries, the products of values with the gradients of outputs, the values, the
    features of the keys, and whether no pair of the tile is masked.
    """
    first = tl.multiple_of(first, N)
    token = tl.cast(first, tl.int64)
    count = slots - first if DIRECT else N
    key = load_rows(k + token * H * K, H * K, count, tl.arange(0, P), K, N)
    value = load_rows(v + token * G * V, G * V, count, tl.arange(0, W), V, N)
    qk, grad_weights = matmul(query, tl.trans(key), PRECISION), matmul(grad_outputs, tl.trans(value), PRECISION)
    unmasked = False
    key_tokens = load_tokens(
        key_features, times, rank, first + tl.arange(0, N), 0, key_blocks * BLOCK, slots, 0, SHARED
    )
    if MASKED:
        high_0, low_0 = load_block_ranks(key_ranks, first // BLOCK)
        unmasked = all_visible(high, low, high_0, low_0, window, CAUSAL)
    return key, qk, grad_weights, value, key_tokens, unmasked


@triton.jit
def weigh_pairs(
    qk, grad_weights, value, query, key, block_lags, params, max_score, delta, unmasked, slots, window,
    DIRECT: tl.constexpr, QUERIES_FIRST: tl.constexpr, SHARED: tl.constexpr, RATIONAL: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the weights of a tile of pairs and the gradients of their scores.

    Returns (weight, weight and score with decay of values, masked score, score), the gradients of the score and of the
    logarithm of the decay of values, the result of `score_terms`, and that of `pair_variances`.

    Weights are not divided by their sum; instead `grad_weights` and `delta` are.
    """
    variances = pair_variances(query, key, block_lags, params, DIRECT, QUERIES_FIRST, CAUSAL, SHARED, PTX)
    key_var, value_var, _key_lag, value_lag, future = variances
    query_norm, key_norm = tl.where(query[0] == query[0], query[0], 0.0), tl.where(key[0] == key[0], key[0], 0.0)
    terms = score_terms(
        qk, query_norm, key_norm, key_var, value_var, future, value_lag[0], params, SHARED, RATIONAL, CAUSAL, PTX
    )
    log_weight = params[3] * terms[0] - max_score
    score = mask_scores(log_weight, float("-inf"), query, key, unmasked, slots, window, DIRECT, MASKED, CAUSAL)
    weight = tl.exp2(score)
    decayed = decay_weights(weight, score, value_var, value_lag, future, params, CAUSAL)
    decayed = round_like(decayed, value, PTX)  # rounded as in the forward pass, so that score gradients sum to 0
    grad_decayed = decayed * grad_weights
    return (weight, decayed, score, log_weight), grad_decayed - weight * delta, grad_decayed, terms, variances


@triton.jit
def add_other_keys(
    sums, query, grad_outputs, query_tokens, max_score, delta, k, v, times, rank, key_features, block_lags, key_ranks,
    first, high, low, slots, key_blocks, window, H, G, params,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to sums of score gradients, without heavy keys, and of weights, and to the largest weight."""
    _key, qk, grad_weights, value, key_tokens, unmasked = load_key_tile(
        query, grad_outputs, k, v, times, rank, key_features, key_ranks, first, high, low, slots, key_blocks, window, H,
        G, K, P, V, W, BLOCK, N, SHARED, CAUSAL, MASKED, DIRECT, PRECISION,
    )  # fmt: skip
    weights, grad_score, _grad_decayed, _terms, _variances = weigh_pairs(
        qk, grad_weights, value, query_tokens, key_tokens, block_lags, params, max_score, delta, unmasked, slots,
        window, DIRECT, True, SHARED, RATIONAL, CAUSAL, MASKED, PTX,
    )  # fmt: skip
    weight = weights[0]
    rest, weight_sum, heaviest = sums
    rest += tl.sum(tl.where(weight > HEAVY, 0.0, grad_score), 1)
    return rest, weight_sum + tl.sum(weight, 1), tl.maximum(heaviest, tl.max(weight, 1))


@triton.jit
def score_gradients(
    qk, grad_weights, value, query, key, block_lags, params, max_score, delta, rest, grad_precision, unmasked, slots,
    window,
    DIRECT: tl.constexpr, QUERIES_FIRST: tl.constexpr, SHARED: tl.constexpr, RATIONAL: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile through its scores.

    Returns the decayed weights; the gradients of `score_vjp`; the residual; the gradients of log temperature and of the
    log decay of values; and decays and lags as from `pair_variances`.

    `rest` is the sum of the gradients of a query's scores for all keys but the heaviest, NaN if none has nearly all
    weight; it is unused if `RATIONAL`. Because these gradients sum to 0, a constant may be subtracted from the score in
    the gradient of the temperature; `max_score` keeps it small.
    """
    weights, grad_score, grad_decayed, terms, variances = weigh_pairs(
        qk, grad_weights, value, query, key, block_lags, params, max_score, delta, unmasked, slots, window, DIRECT,
        QUERIES_FIRST, SHARED, RATIONAL, CAUSAL, MASKED, PTX,
    )  # fmt: skip
    weight, decayed, score, log_weight = weights
    key_var, value_var, key_lag, value_lag, future = variances
    query_norm, key_norm = tl.where(query[0] == query[0], query[0], 0.0), tl.where(key[0] == key[0], key[0], 0.0)
    if not RATIONAL:
        grad_score = tl.where((weight > HEAVY) & (rest == rest), -rest, grad_score)
    grad_log_precision = 0.0
    if VARIANCE:
        precisions = token_precisions(terms, key_var, value_var, future, params, RATIONAL, CAUSAL, PTX)
        grad_log_precision = tl.where(score > float("-inf"), precisions * grad_precision, 0.0)
    value_growth = value_lag[2]
    if QUERIES_FIRST and not DIRECT and not SHARED:
        value_growth += value_lag[1] * value_lag[1] * key[2][2]
    grads = score_vjp(
        grad_score, grad_log_precision, qk, query_norm, key_norm, key_var, value_var, value_growth, future, params,
        terms, SHARED, RATIONAL, CAUSAL, VARIANCE, PTX,
    )  # fmt: skip
    return decayed, grads, terms[1], grad_score * log_weight, grad_decayed, key_var, key_lag, value_lag, future
