"""Scores of a tile of `attend_radial` and their derivatives, as Triton functions.

A pair has two components: along the direction of the query's own value (index 0) and across it (index 1). Arguments of
queries or of keys have one axis of the tile, or both, so the tile may be transposed. Logarithms are to base 2.

For later keys, variances and squared residuals are multiplied by the squared decay, as in `triton.scores`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._attend.triton.block_masks import OUTSIDE_RANK, load_times
from kalmix.ops._attend.triton.scores import LOG2E, TINY, kappa, time_difference
from kalmix.ops._shared.triton.ptx import log2, reciprocal

PARAMS = tl.constexpr(12)  # numbers per head: see `load_radial_params`
RANKS_PER_STEP = tl.constexpr(1024)  # ranks that are loaded together
UNSPECIALIZED = ["tokens", "slots", "window", "H"]  # integer arguments whose values do not trigger recompilation


@triton.jit
def load_radial_params(head_params, head):
    """Load rate, floor, and (process, key, query, 1 / nu, temperature) of both components."""
    at = head_params + head * PARAMS
    along = tl.load(at + 1), tl.load(at + 3), tl.load(at + 5), 1.0 / tl.load(at + 7), tl.load(at + 9)
    across = tl.load(at + 2), tl.load(at + 4), tl.load(at + 6), 1.0 / tl.load(at + 8), tl.load(at + 10)
    return tl.load(at), tl.load(at + 11), along, across


@triton.jit
def load_positions(times, rank, slot, slots, AXIS: tl.constexpr):
    """Load times, ranks and slot numbers of tokens."""
    inside = slot < slots
    token_ranks = tl.load(rank + slot, mask=inside, other=OUTSIDE_RANK)
    return (
        tl.expand_dims(load_times(times + slot, inside), AXIS),
        tl.expand_dims(token_ranks, AXIS),
        tl.expand_dims(slot, AXIS),
    )


@triton.jit
def load_scalars(scalars, stride, at, mask, AXIS: tl.constexpr):
    """Load squared norm and the products with the direction and with i times the direction of queries."""
    return (
        tl.expand_dims(tl.load(scalars + at, mask=mask, other=0.0), AXIS),
        tl.expand_dims(tl.load(scalars + stride + at, mask=mask, other=0.0), AXIS),
        tl.expand_dims(tl.load(scalars + 2 * stride + at, mask=mask, other=0.0), AXIS),
    )


@triton.jit
def zero_nan(x):
    """Replace NaN by 0."""
    return tl.where(x == x, x, 0.0)


@triton.jit
def load_times_i(base, count, column, K: tl.constexpr, SIZE: tl.constexpr, SIGN: tl.constexpr):
    """Load contiguous rows `[SIZE, columns]` multiplied by SIGN i; see `load_rows`."""
    t = tl.arange(0, SIZE)
    is_real = column < K // 2
    source = tl.where(is_real, column + K // 2, column - K // 2)
    x = tl.load(base + t[:, None] * K + source[None, :], mask=(t < count)[:, None] & (column < K)[None, :], other=0.0)
    negative = is_real if SIGN > 0 else column >= K // 2
    exact = x.to(tl.float32)  # Triton's interpreter treats bfloat16 as integers
    return tl.where(negative[None, :], -exact, exact).to(x.dtype)


@triton.jit
def visible_pairs(query, key, slots, past_length, tokens, window, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """Return the mask of pairs that attend; query and key are from `load_positions`."""
    if MASKED:
        difference = query[1] - key[1]
        visible = (difference > (-1 if CAUSAL else -window)) & (difference < window)
    else:
        visible = (key[2] < slots) & (query[2] < slots)
        if CAUSAL:
            visible = visible & (query[2] >= key[2])
    return visible


@triton.jit
def visible_range(rank, first_slot, last_slot, high, low, window, OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the first slot from `first_slot` on that may attend to, or be attended by, ranks in [low, high]; and the
    last one plus 1. `OF_QUERIES`: the slots are those of queries, the ranks those of keys."""
    first, stop = last_slot, first_slot
    for start in range(first_slot, last_slot, RANKS_PER_STEP):
        slot = start + tl.arange(0, RANKS_PER_STEP)
        inside = slot < last_slot
        ranks = tl.load(rank + slot, mask=inside, other=0)
        if OF_QUERIES:
            visible = (ranks - low > (-1 if CAUSAL else -window)) & (ranks - high < window)
        else:
            visible = (high - ranks > (-1 if CAUSAL else -window)) & (low - ranks < window)
        visible = visible & inside
        first = tl.minimum(first, tl.min(tl.where(visible, slot, last_slot), 0))
        stop = tl.maximum(stop, tl.max(tl.where(visible, slot + 1, first_slot), 0))
    return first, stop


@triton.jit
def component_variances(noise, growth, square, future, CAUSAL: tl.constexpr):
    """Compute the variances of a component without and with query noise."""
    process, key, query, _inverse_nu, _temperature = noise
    if CAUSAL:
        state, query_part = process * growth + key * square, query
    else:
        state, query_part = (
            process * growth + key * tl.where(future, 1.0, square),
            query * tl.where(future, square, 1.0),
        )
    return tl.maximum(state, TINY), tl.maximum(state + query_part, TINY)


@triton.jit
def component_cost(squared, variances, noise, growth_exponent, RATIONAL: tl.constexpr, PTX: tl.constexpr):
    """Compute -log2(weight / V) of a component."""
    total, scaled = variances[1], noise[3] * squared
    cost = log2(total + scaled, PTX) if RATIONAL else LOG2E * scaled * reciprocal(total, PTX) + log2(total, PTX)
    return cost + growth_exponent


@triton.jit
def component_precision(
    squared, variances, noise, decay, future, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, PTX: tl.constexpr
):
    """Compute weight / variance without query noise of a component."""
    state, total = variances
    if RATIONAL:
        weight = total * reciprocal(total + noise[3] * squared, PTX)
    else:
        weight = tl.exp2(-LOG2E * noise[3] * squared * reciprocal(total, PTX))
    if not CAUSAL:
        weight *= tl.where(future, decay * decay, 1.0)
    return weight * reciprocal(state, PTX)


@triton.jit
def pair_residuals(qk, uk, iuk, query, key_norm, query_time, key_time, params, CAUSAL: tl.constexpr):
    """Compute lags, residuals and variances of all pairs.

    `query` is from `load_scalars`; uk and iuk are the products of keys with the direction and with i times it.

    Returns:
        (signed lag, distance, mask of later keys, decay, kappa), the factors of query and key, (real, imaginary) parts
        of the residual along the direction, squared residuals along and across, and the variances of both components.
    """
    rate, floor, along, across = params
    lag = time_difference(query_time, key_time)
    future = lag < 0
    distance = tl.maximum(lag, 0.0) if CAUSAL else tl.abs(lag)
    decay = tl.exp2(-LOG2E * rate * distance)
    growth = kappa(rate, distance, decay)
    query_factor, key_factor = 1.0, decay + floor
    if not CAUSAL:
        query_factor = tl.where(future, decay, 1.0)
        key_factor = tl.where(future, 1.0 + floor * decay, key_factor)
    real = query_factor * query[1] - key_factor * uk
    imaginary = query_factor * query[2] - key_factor * iuk
    radial = real * real + imaginary * imaginary
    residual = key_factor * (key_factor * key_norm - 2.0 * query_factor * qk) + query_factor * query_factor * query[0]
    tangential = tl.maximum(residual - radial, 0.0, propagate_nan=tl.PropagateNan.ALL)
    square = decay * decay
    variances = (
        component_variances(along, growth, square, future, CAUSAL),
        component_variances(across, growth, square, future, CAUSAL),
    )
    lags = lag, distance, future, decay, growth
    return lags, (query_factor, key_factor), (real, imaginary), (radial, tangential), variances


@triton.jit
def pair_costs(lags, squared, variances, params, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, PTX: tl.constexpr):
    """Compute the costs of both components."""
    rate, _floor, along, across = params
    exponent = 0.0
    if not CAUSAL:
        exponent = tl.where(lags[2], 2.0 * LOG2E * rate * lags[1], 0.0)
    return (
        component_cost(squared[0], variances[0], along, exponent, RATIONAL, PTX),
        component_cost(squared[1], variances[1], across, exponent, RATIONAL, PTX),
    )


@triton.jit
def decayed_weight(weight, score, lags, rate, CAUSAL: tl.constexpr):
    """Return weight * decay of the value. For later keys the decay exceeds 1 and is added to the exponent instead."""
    return weight * lags[3] if CAUSAL else tl.exp2(score - LOG2E * rate * lags[0])


@triton.jit
def component_vjp(
    grad_score, grad_log_precision, squared, variances, noise, square, distance, future,
    RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a component through its scores (natural logarithm) and logarithms of precisions.

    Returns the gradients of the squared residual, of the variance through the query noise and through the other
    parameters, of 1 / nu, and of the rate through the divisor of later keys. Terms that nearly cancel if a noise is
    small or large are simplified analytically.
    """
    _process, _key, query, inverse_nu, temperature = noise
    state, total = variances
    scaled, softmax_cost = inverse_nu * squared, -temperature * grad_score
    grad_cost, precision_query, grad_state_precision = softmax_cost, 0.0, 0.0
    inverse_total = tl.where(total > TINY, reciprocal(total, PTX), 0.0)
    query_part = query
    if not CAUSAL:
        query_part = query * tl.where(future, square, 1.0)
    if VARIANCE:
        grad_cost -= grad_log_precision
        precision_query = grad_log_precision * inverse_total
        grad_state_precision = tl.where(state > TINY, grad_log_precision * reciprocal(state, PTX), 0.0)
    if RATIONAL:
        inverse = reciprocal(total + scaled, PTX)
        weighted = grad_cost * inverse
        grad_squared, grad_inverse_nu = weighted * inverse_nu, weighted * squared
        grad_query, grad_state = softmax_cost * inverse, weighted
        if VARIANCE:
            grad_query += precision_query * scaled * inverse
            grad_state -= grad_state_precision * query_part * inverse_total
        grad_divisor = softmax_cost * inverse * (state + scaled)
        if VARIANCE and not CAUSAL:
            grad_divisor -= grad_log_precision * (1.0 + scaled * query_part * inverse * inverse_total)
        unclamped = total > TINY
        grad_query, grad_state = tl.where(unclamped, grad_query, 0.0), tl.where(unclamped, grad_state, 0.0)
    else:
        weighted, ratio = grad_cost * reciprocal(total, PTX), scaled * reciprocal(total, PTX)
        grad_squared, grad_inverse_nu = weighted * inverse_nu, weighted * squared
        grad_query = (softmax_cost - grad_cost * ratio) * inverse_total
        grad_state = grad_query
        if VARIANCE:
            grad_state -= grad_state_precision
        grad_divisor = (softmax_cost * state + grad_cost * ratio * query_part) * inverse_total
        if VARIANCE:
            grad_divisor -= grad_log_precision
    grad_rate = 0.0
    if not CAUSAL:
        grad_rate = tl.where(future, 2.0 * distance * grad_divisor, 0.0)
    return grad_squared, grad_query, grad_state, grad_inverse_nu, grad_rate


@triton.jit
def residual_vjp(qk, uk, iuk, query, key_norm, lags, factors, along, grads, params, CAUSAL: tl.constexpr):
    """Compute gradients through the residuals; `grads` are those of the squared residuals along and across.

    Returns the gradients of qk, uk and iuk; of the three scalars of queries and of the squared norm of keys; of the
    decay, and of the floor.
    """
    floor, query_factor, key_factor = params[1], factors[0], factors[1]
    real, imaginary = along
    grad_residual, difference = grads[1], 2.0 * (grads[0] - grads[1])
    grad_real, grad_imaginary = real * difference, imaginary * difference
    grad_qk = -2.0 * query_factor * key_factor * grad_residual
    grad_key_factor = (
        2.0 * grad_residual * (key_factor * key_norm - query_factor * qk) - grad_real * uk - grad_imaginary * iuk
    )
    grad_decay, grad_floor = grad_key_factor, grad_key_factor
    if not CAUSAL:
        future = lags[2]
        grad_query_factor = (
            2.0 * grad_residual * (query_factor * query[0] - key_factor * qk)
            + grad_real * query[1] + grad_imaginary * query[2]
        )  # fmt: skip
        grad_decay = tl.where(future, floor * grad_key_factor + grad_query_factor, grad_key_factor)
        grad_floor = tl.where(future, lags[3] * grad_key_factor, grad_key_factor)
    query_grads = (
        query_factor * query_factor * grad_residual, query_factor * grad_real, query_factor * grad_imaginary,
    )  # fmt: skip
    return (
        (grad_qk, -key_factor * grad_real, -key_factor * grad_imaginary), query_grads,
        key_factor * key_factor * grad_residual, grad_decay, grad_floor,
    )  # fmt: skip
