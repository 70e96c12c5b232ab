"""Lags, scores of a tile and their derivatives, as Triton functions.

A lag is a tuple of four numbers: its length, the decay over it, kappa, and the derivative of kappa by the rate. Two
consecutive lags combine to one (`join_lags`) without subtractions and without exponentials of positive numbers. So the
lag of a pair in two different blocks is combined from three: from the key to the end of its block, between the blocks,
and from the start of the query's block to the query (`chained_variances`). Other lags are computed per pair.

All functions are elementwise. Arguments of queries or of keys have one axis of the tile, or both, so the tile may be
transposed. Logarithms are to base 2. Some quantities have a minus sign built in, which saves an instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.kappa import LOG2E, TINY, kappa, kappa_slope
from kalmix.ops._shared.triton.ptx import log2, reciprocal

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def lag_terms(rate, lag, PTX: tl.constexpr):
    """Compute the four numbers of a lag >= 0."""
    decay = tl.exp2(-LOG2E * rate * lag)
    return lag, decay, kappa(rate, lag, decay), kappa_slope(rate, lag, decay, PTX)


@triton.jit
def join_lags(later, earlier):
    """Combine a lag with the one before it."""
    lag, decay, accumulated = later[0], later[1], later[2]
    square, slope = decay * decay, earlier[3] - 2.0 * lag * earlier[2]
    return lag + earlier[0], decay * earlier[1], accumulated + square * earlier[2], later[3] + square * slope


@triton.jit
def time_difference(later, earlier):
    """Subtract float64 times; return the difference in float32, rounded once."""
    high, high_0 = later.to(tl.float32), earlier.to(tl.float32)
    low, low_0 = (later - high.to(tl.float64)).to(tl.float32), (earlier - high_0.to(tl.float64)).to(tl.float32)
    return (high - high_0) + (low - low_0)


@triton.jit
def load_head_params(head_params, head, H):
    """Load the noises of keys and of values, each (rate, process, key, query), 2 / nu, minus temperature, and floor."""
    at = head_params + head
    keys = tl.load(at), tl.load(at + H), tl.load(at + 2 * H), tl.load(at + 3 * H)
    values = tl.load(at + 4 * H), tl.load(at + 5 * H), tl.load(at + 6 * H), tl.load(at + 7 * H)
    return keys, values, 2.0 / tl.load(at + 8 * H), -tl.load(at + 9 * H), tl.load(at + 10 * H)


@triton.jit
def lag_variances(lag, noise, future, CAUSAL: tl.constexpr):
    """Compute the variances without and with query noise; for later keys divided by the squared decay."""
    _key_lag, decay, accumulated, _slope = lag
    _rate, process, key, query = noise
    square = decay * decay
    if CAUSAL:
        state = process * accumulated + key * square
        total = process * accumulated + (key * square + tl.maximum(query, TINY))
    else:
        state = process * accumulated + key * tl.where(future, 1.0, square)
        total = tl.maximum(state + query * tl.where(future, square, 1.0), TINY)
    return tl.maximum(state, TINY), total


@triton.jit
def chained_variances(query, block_lag, key, noise, QUERIES_FIRST: tl.constexpr):
    """Compute (decay, variance without query noise, variance with it) over three consecutive lags, and a lag.

    The lag between the blocks is combined with the tokens on the first axis of the tile, where that costs least. The
    returned lag is that of the query to the end of the key's block if queries come first, else that between the blocks.
    The features of a token also have a variance: of a key after its lag, of a query before its lag.
    """
    _rate, process, _key, query_noise = noise
    if QUERIES_FIRST:
        lag = join_lags(query, block_lag)
        process_var, decay, square, key_state = process * lag[2], lag[1] * key[1], lag[1] * lag[1], key[4]
        query_var = process_var + tl.maximum(query_noise, TINY)
    else:
        lag = block_lag
        process_var, decay, square = process * query[2], query[1] * (block_lag[1] * key[1]), query[1] * query[1]
        key_state, query_var = process * block_lag[2] + block_lag[1] * block_lag[1] * key[4], query[4]
    return (decay, tl.maximum(square * key_state + process_var, TINY), square * key_state + query_var), lag


@triton.jit
def residual_factors(decay, floor, future, CAUSAL: tl.constexpr):
    """Return the factors of queries and of (negated) keys in the residual."""
    query_factor, key_factor = 1.0, tl.zeros_like(decay) - floor - decay
    if not CAUSAL:
        query_factor, key_factor = tl.where(future, decay, 1.0), tl.where(future, -1.0 - floor * decay, key_factor)
    return query_factor, key_factor


@triton.jit
def score_terms(
    qk, query_norm, key_norm, key_var, value_var, future, distance, params,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the cost, -log2(weight / V), half the squared residual, and V + (squared residual) / nu.

    `key_var` and `value_var` are (decay, variance without query noise, variance with it), as from `pair_variances`.
    `query_norm` and `key_norm` are half the squared norms.
    """
    _decay, _state, total = key_var
    _decay, _state, value_total = value_var
    _keys, values, two_over_nu, _neg_temperature, floor = params
    query_factor, key_factor = residual_factors(key_var[0], floor, future, CAUSAL)
    if CAUSAL:
        # In this order, the compiler does not start the accumulator of the matrix product from a sum.
        residual = query_norm + key_factor * tl.fma(key_factor, key_norm, qk)
    else:
        residual = query_factor * (query_factor * query_norm + key_factor * qk) + key_factor * key_factor * key_norm
    residual = tl.maximum(residual, 0.0, propagate_nan=tl.PropagateNan.ALL)  # NaN where a token is not finite
    inflated_total = total + two_over_nu * residual
    if RATIONAL:
        cost = log2(inflated_total, PTX)
        if not SHARED:
            cost += log2(value_total, PTX) - log2(total, PTX)
    else:
        cost = LOG2E * two_over_nu * residual * reciprocal(total, PTX) + log2(value_total, PTX)
    if not CAUSAL:
        cost += tl.where(future, 2.0 * LOG2E * values[0] * distance, 0.0)
    return cost, residual, inflated_total


@triton.jit
def token_precisions(
    terms, key_var, value_var, future, params, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, PTX: tl.constexpr
):
    """Return the terms of keys in the total precision: weight / variance without query noise."""
    _cost, residual, inflated_total = terms
    if RATIONAL:
        weight = key_var[2] * reciprocal(inflated_total, PTX)
    else:
        weight = tl.exp2(-LOG2E * params[2] * residual * reciprocal(key_var[2], PTX))
    if not CAUSAL:
        weight *= tl.where(future, value_var[0] * value_var[0], 1.0)
    return weight * reciprocal(value_var[1], PTX)


@triton.jit
def score_vjp(
    grad_score, grad_log_precision, qk, query_norm, key_norm, key_var, value_var, value_growth, future, params, terms,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute gradients through scores (with temperature) and through the logarithms of precisions.

    Returns the gradients of qk, of the norms of queries and of keys, of the factor of keys, of the residual, of the
    variance of keys, of the variance of values through the query noise and through the other parameters,
    `grad_log_precision` itself, and the output of `value_noise_vjp`. If `SHARED`, the two gradients of the variance of
    values include that of keys. The first five are for nu = 2; the caller multiplies them by 2 / nu. Terms of a pair
    that nearly cancel if the key noise is small are simplified analytically instead of subtracted. `value_growth` is
    kappa of the pair by the dynamics of values.
    """
    keys, values, two_over_nu, neg_temperature, floor = params
    _cost, residual, inflated_total = terms
    decay, _state, total = key_var
    _decay, state, value_total = value_var
    grad_softmax = neg_temperature * grad_score
    grad_cost = grad_softmax
    if VARIANCE:
        grad_cost -= grad_log_precision
    if RATIONAL:
        grad_residual = grad_cost * reciprocal(inflated_total, PTX)
        grad_key_total = grad_residual
        if not SHARED:
            grad_key_total *= tl.where(total > TINY, two_over_nu * residual * reciprocal(total, PTX), 0.0) * -1.0
    else:
        inverse = reciprocal(total, PTX)
        grad_residual = grad_cost * inverse
        grad_key_total = grad_residual * two_over_nu * residual * -1.0
        if SHARED:
            grad_key_total += grad_cost
        grad_key_total = tl.where(total > TINY, grad_key_total * inverse, 0.0)
    grad_value_total = grad_key_total
    if not SHARED:
        grad_value_total = tl.where(value_total > TINY, grad_softmax * reciprocal(value_total, PTX), 0.0)
    grad_value_state, grad_state = grad_value_total, 0.0
    if VARIANCE:
        grad_state = tl.where(state > TINY, grad_log_precision * reciprocal(state, PTX), 0.0)
        if SHARED:
            query_noise = tl.maximum(keys[3], TINY)
            if not CAUSAL:
                query_noise = keys[3] * tl.where(future, decay * decay, 1.0)
            inverse_total = tl.where(total > TINY, reciprocal(total, PTX), 0.0)
            grad_value_state = grad_key_total - grad_state * (query_noise * inverse_total)
            if RATIONAL:
                grad_value_total = (
                    grad_softmax + grad_log_precision * (two_over_nu * residual * inverse_total)
                ) * reciprocal(inflated_total, PTX)
            else:
                grad_value_total = grad_key_total + grad_log_precision * inverse_total
        else:
            grad_value_state = grad_value_total - grad_state
    query_factor, key_factor = residual_factors(decay, floor, future, CAUSAL)
    grad_qk, grad_query_norm = key_factor * grad_residual, grad_residual
    if CAUSAL:
        grad_factor = grad_residual * (key_factor * key_norm + tl.fma(key_factor, key_norm, qk))
    else:
        grad_factor = grad_residual * (key_factor * key_norm + (key_factor * key_norm + query_factor * qk))
        grad_qk, grad_query_norm = query_factor * grad_qk, query_factor * query_factor * grad_residual
    grad_key_norm = key_factor * key_factor * grad_residual
    value_noises = 0.0, 0.0, 0.0
    if not SHARED:
        value_noises = value_noise_vjp(grad_softmax, grad_state, value_var, value_growth, values, future, CAUSAL, PTX)
    return (
        grad_qk, grad_query_norm, grad_key_norm, grad_factor, grad_residual, grad_key_total, grad_value_total,
        grad_value_state, grad_log_precision, value_noises,
    )  # fmt: skip


@triton.jit
def value_noise_vjp(
    grad_softmax, grad_precision_state, value_var, value_growth, noise, future, CAUSAL: tl.constexpr, PTX: tl.constexpr
):
    """Compute the gradients of the key and the query noise of values that have their own dynamics.

    Returns two gradients through the logarithm of the variance with query noise, and the gradient of the variance
    without, through the precision. The score gradients of a query sum to 0. So the logarithm is taken relative to its
    value at lag 0: if the variance hardly depends on the lag, terms are small, instead of large ones that cancel.
    """
    rate, process, key, query = noise
    inverse = reciprocal(value_var[2], PTX) * value_growth
    unclamped, scale = value_var[2] > TINY, grad_softmax * reciprocal(tl.maximum(key + query, TINY), PTX)
    decayed, constant = query, key  # the other noise of the one that is multiplied by the squared decay
    if not CAUSAL:
        decayed, constant = tl.where(future, key, query), tl.where(future, query, key)
    grad_decayed = scale * tl.where(unclamped, -(process + 2.0 * rate * decayed) * inverse, -1.0)
    grad_constant = scale * tl.where(unclamped, (2.0 * rate * constant - process) * inverse, -1.0)
    if CAUSAL:
        return grad_decayed, grad_constant, -grad_precision_state
    return (
        tl.where(future, grad_constant, grad_decayed), tl.where(future, grad_decayed, grad_constant),
        -grad_precision_state,
    )  # fmt: skip


@triton.jit
def noise_vjp(lag, noise, grad_decay, grad_log_decay, grad_query_var, grad_state, future, CAUSAL: tl.constexpr):
    """Compute the gradients of rate, process, key and query noise from those of the decay and of the variance.

    `grad_query_var` is the gradient of the variance through the query noise, `grad_state` that through the other
    parameters. Later keys are treated as not divided by the squared decay; otherwise the gradient of the rate would be
    a difference that cancels if the query noise is large. `grad_log_decay` is the gradient of the logarithm of the
    decay of later keys.
    """
    distance, decay, accumulated, slope = lag
    _rate, process, key, _query = noise
    square = decay * decay
    grad_key, grad_query, grad_square = square * grad_state, grad_query_var, key * grad_state
    grad_rate = process * slope * grad_state - distance * decay * (grad_decay + 2.0 * decay * grad_square)
    if not CAUSAL:
        grad_key, grad_query = (
            tl.where(future, grad_state, grad_key),
            tl.where(future, square * grad_query_var, grad_query_var),
        )
        grad_growth = 2.0 * (process * accumulated + key) * grad_query_var - grad_log_decay
        grad_rate = tl.where(future, process * slope * grad_state + distance * grad_growth, grad_rate)
    return grad_rate, accumulated * grad_state, grad_key, grad_query
