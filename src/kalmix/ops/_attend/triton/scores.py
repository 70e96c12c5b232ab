"""What queries make of keys, in Triton: the algebra of lags, scores of a tile, and their derivatives.

A lag is four numbers: its length, the decay over it, kappa, and the derivative of kappa for the rate. Two lags in a row
are a lag (`joined`), without a difference or an exponential of a positive number. So what lies between two tokens is
put together from the query's way since the start of its block, the key's until the end of its own, and what lies
between (`through`); only for a pair without such points between them is it computed anew.

Everything here is elementwise, and what is given of queries and of keys has their axis, or both: a tile may lie either
way. Logarithms are to base 2. Nothing is negated where it can be negative from the start: a sign is an instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.ptx import log2, reciprocal

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(1.1754943508222875e-38)
NEAR = tl.constexpr(0.5)  # below it, kappa and its derivative are summed as series


@triton.jit
def kappa(rate, lag, decay):
    y = 2.0 * rate * lag
    small = tl.minimum(y, NEAR)
    series = -1.0 / 40320 * small + 1.0 / 5040
    series = series * -small + 1.0 / 720
    series = series * -small + 1.0 / 120
    series = series * -small + 1.0 / 24
    series = series * -small + 1.0 / 6
    series = series * -small + 0.5
    series = series * -small + 1.0
    return tl.where(y > NEAR, (1.0 - decay * decay) * (1.0 / tl.maximum(2.0 * rate, TINY)), lag * series)


@triton.jit
def kappa_slope(rate, lag, decay, PTX: tl.constexpr):
    """The derivative of kappa for the rate."""
    y = 2.0 * rate * lag
    small = tl.minimum(y, NEAR)
    series = -1.0 / 45360 * small + 1.0 / 5760
    series = series * -small + 1.0 / 840
    series = series * -small + 1.0 / 144
    series = series * -small + 1.0 / 30
    series = series * -small + 0.125
    series = series * -small + 1.0 / 3
    series = series * small - 0.5
    far = tl.maximum(y, NEAR)
    direct = (decay * decay * (1.0 + far) - 1.0) * reciprocal(far * far, PTX)
    return 2.0 * lag * lag * tl.where(y > NEAR, direct, series)


@triton.jit
def after(rate, lag, PTX: tl.constexpr):
    """A lag >= 0."""
    decay = tl.exp2(-LOG2E * rate * lag)
    return lag, decay, kappa(rate, lag, decay), kappa_slope(rate, lag, decay, PTX)


@triton.jit
def joined(later, earlier):
    """One lag, and before it another."""
    lag, decay, grown = later[0], later[1], later[2]
    square, more = decay * decay, earlier[3] - 2.0 * lag * earlier[2]
    return lag + earlier[0], decay * earlier[1], grown + square * earlier[2], later[3] + square * more


@triton.jit
def between(later, earlier):
    """How much later times are than others, float64: the difference in float32, rounded once."""
    high, high_0 = later.to(tl.float32), earlier.to(tl.float32)
    low, low_0 = (later - high.to(tl.float64)).to(tl.float32), (earlier - high_0.to(tl.float64)).to(tl.float32)
    return (high - high_0) + (low - low_0)


@triton.jit
def load_model(numbers, head, H):
    """The noises of keys and of values, each (rate, process, key, query), 2 / nu, minus the temperature, and floor."""
    at = numbers + head
    keys = tl.load(at), tl.load(at + H), tl.load(at + 2 * H), tl.load(at + 3 * H)
    values = tl.load(at + 4 * H), tl.load(at + 5 * H), tl.load(at + 6 * H), tl.load(at + 7 * H)
    return keys, values, 2.0 / tl.load(at + 8 * H), -tl.load(at + 9 * H), tl.load(at + 10 * H)


@triton.jit
def variances(lag, noise, ahead, CAUSAL: tl.constexpr):
    """After a lag, without the noise of the query and with it; what is ahead divided by the decay's square."""
    _lag, decay, grown, _slope = lag
    _rate, process, key, query = noise
    square = decay * decay
    if CAUSAL:
        certain = process * grown + key * square
        whole = process * grown + (key * square + tl.maximum(query, TINY))
    else:
        certain = process * grown + key * tl.where(ahead, 1.0, square)
        whole = tl.maximum(certain + query * tl.where(ahead, square, 1.0), TINY)
    return tl.maximum(certain, TINY), whole


@triton.jit
def through(query, middle, key, noise, QUERIES_FIRST: tl.constexpr):
    """Over three lags in a row: (decay, variance without the noise of the query, with it), and a lag.

    The middle one is joined to what lies along the first axis of a tile, where it costs least: the lag is the query's
    until it meets the key's block, or the middle one. Besides their lags, tokens have what is unsure of them there: of
    keys after their lag, of queries before theirs.
    """
    _rate, process, _key, query_noise = noise
    if QUERIES_FIRST:
        lag = joined(query, middle)
        since, decay, square, unsure = process * lag[2], lag[1] * key[1], lag[1] * lag[1], key[4]
        doubted = since + tl.maximum(query_noise, TINY)
    else:
        lag = middle
        since, decay, square = process * query[2], query[1] * (middle[1] * key[1]), query[1] * query[1]
        unsure, doubted = process * middle[2] + middle[1] * middle[1] * key[4], query[4]
    return (decay, tl.maximum(square * unsure + since, TINY), square * unsure + doubted), lag


@triton.jit
def factors(decay, floor, ahead, CAUSAL: tl.constexpr):
    """What queries, and keys, are multiplied by before they are added up to the residual."""
    of_query, of_key = 1.0, tl.zeros_like(decay) - floor - decay
    if not CAUSAL:
        of_query, of_key = tl.where(ahead, decay, 1.0), tl.where(ahead, -1.0 - floor * decay, of_key)
    return of_query, of_key


@triton.jit
def scored(
    gram, query_size, key_size, near, far, ahead, away, model,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Scores before temperature, negated, and what they are made of: half the residual, and the level.

    `near` and `far` are as `through` has them, of keys and of values. The size of a vector is half its square.
    """
    _decay, _certain, whole = near
    _decay, _certain, apart = far
    _keys, values, per_nu, _cooling, floor = model
    of_query, of_key = factors(near[0], floor, ahead, CAUSAL)
    if CAUSAL:
        residual = query_size + of_key * tl.fma(of_key, key_size, gram)  # no sum that the product would begin from
    else:
        residual = of_query * (of_query * query_size + of_key * gram) + of_key * of_key * key_size
    residual = tl.maximum(residual, 0.0, propagate_nan=tl.PropagateNan.ALL)  # NaN where a token is not finite
    level = whole + per_nu * residual
    if RATIONAL:
        cost = log2(level, PTX)
        if not SHARED:
            cost += log2(apart, PTX) - log2(whole, PTX)
    else:
        cost = LOG2E * per_nu * residual * reciprocal(whole, PTX) + log2(apart, PTX)
    if not CAUSAL:
        cost += tl.where(ahead, 2.0 * LOG2E * values[0] * away, 0.0)
    return cost, residual, level


@triton.jit
def precisions(found, near, far, ahead, model, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, PTX: tl.constexpr):
    """What tokens add to the total precision."""
    _cost, residual, level = found
    if RATIONAL:
        weight = near[2] * reciprocal(level, PTX)
    else:
        weight = tl.exp2(-LOG2E * model[2] * residual * reciprocal(near[2], PTX))
    if not CAUSAL:
        weight *= tl.where(ahead, far[0] * far[0], 1.0)
    return weight * reciprocal(far[1], PTX)


@triton.jit
def pull_back(
    to_score, part, gram, query_size, key_size, near, far, ahead, model, found,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, VARIANCE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Compute gradients of what scores after temperature, and logarithms of precisions (`part`), are made of.

    In this order: gram; the sizes of queries and of keys; the factor of keys; the residual; the variance of keys; that
    of values through the query noise, and through all else (if `SHARED`, these two are of keys and values together);
    and the logarithm of precisions, as given. The first five are for a nu of 2: the caller knows better. Terms of a
    pair that nearly cancel where the key noise is small are one formula, and never a difference of numbers.
    """
    keys, _values, per_nu, cooling, floor = model
    _cost, residual, level = found
    decay, _certain, whole = near
    _decay, certain, apart = far
    tempered = cooling * to_score
    to_cost = tempered
    if VARIANCE:
        to_cost -= part
    if RATIONAL:
        to_residual = to_cost * reciprocal(level, PTX)
        to_whole = to_residual
        if not SHARED:
            to_whole *= tl.where(whole > TINY, per_nu * residual * reciprocal(whole, PTX), 0.0) * -1.0
    else:
        inverse = reciprocal(whole, PTX)
        to_residual = to_cost * inverse
        to_whole = to_residual * per_nu * residual * -1.0
        if SHARED:
            to_whole += to_cost
        to_whole = tl.where(whole > TINY, to_whole * inverse, 0.0)
    to_apart = to_whole
    if not SHARED:
        to_apart = tl.where(apart > TINY, tempered * reciprocal(apart, PTX), 0.0)
    to_sure = to_apart
    if VARIANCE:
        known = tl.where(certain > TINY, part * reciprocal(certain, PTX), 0.0)
        if SHARED:
            asked = tl.maximum(keys[3], TINY)
            if not CAUSAL:
                asked = keys[3] * tl.where(ahead, decay * decay, 1.0)
            per_whole = tl.where(whole > TINY, reciprocal(whole, PTX), 0.0)
            to_sure = to_whole - known * (asked * per_whole)
            if RATIONAL:
                to_apart = (tempered + part * (per_nu * residual * per_whole)) * reciprocal(level, PTX)
            else:
                to_apart = to_whole + part * per_whole
        else:
            to_sure = to_apart - known
    of_query, of_key = factors(decay, floor, ahead, CAUSAL)
    to_gram, to_query_size = of_key * to_residual, to_residual
    if CAUSAL:
        to_key = to_residual * (of_key * key_size + tl.fma(of_key, key_size, gram))
    else:
        to_key = to_residual * (of_key * key_size + (of_key * key_size + of_query * gram))
        to_gram, to_query_size = of_query * to_gram, of_query * of_query * to_residual
    to_key_size = of_key * of_key * to_residual
    return to_gram, to_query_size, to_key_size, to_key, to_residual, to_whole, to_apart, to_sure, part


@triton.jit
def of_noise(lag, noise, to_decay, to_fall, to_asked, to_sure, ahead, CAUSAL: tl.constexpr):
    """Gradients of rate, process, key and query noise, given those of the decay and of the variance: through the query
    noise, and through all else.

    What is ahead counts as not divided, or the rate's would be a difference where the query noise is large: `to_fall`
    is that of the logarithm of the decay there.
    """
    away, decay, grown, slope = lag
    _rate, process, key, _query = noise
    square = decay * decay
    to_key, to_query, to_square = square * to_sure, to_asked, key * to_sure
    to_rate = process * slope * to_sure - away * decay * (to_decay + 2.0 * decay * to_square)
    if not CAUSAL:
        to_key, to_query = tl.where(ahead, to_sure, to_key), tl.where(ahead, square * to_asked, to_asked)
        to_rise = 2.0 * (process * grown + key) * to_asked - to_fall
        to_rate = tl.where(ahead, process * slope * to_sure + away * to_rise, to_rate)
    return to_rate, grown * to_sure, to_key, to_query
