"""What queries make of keys, in Triton: the algebra of lags, scores of a tile, and their derivatives.

A lag is four numbers: its length, the decay over it, kappa, and the derivative of kappa for the rate. Two lags in a row
are a lag (`joined`), without a difference or an exponential of a positive number. So the numbers of a pair of tokens
are put together from those of the query since the start of its block, of the key until the end of its own, and of what
lies between; only for a pair without such points between them are they computed anew.

Everything here is elementwise, and what is given of queries and of keys has their axis, or both: a tile may lie either
way. Logarithms are to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.kernels.primitives.triton_ptx import log2, reciprocal

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(1.1754943508222875e-38)
NEAR = tl.constexpr(0.5)  # below it, kappa and its derivative are summed as series


@triton.jit
def kappa(rate, lag):
    y = 2.0 * rate * lag
    small = tl.minimum(y, NEAR)
    series = -1.0 / 40320 * small + 1.0 / 5040
    series = series * -small + 1.0 / 720
    series = series * -small + 1.0 / 120
    series = series * -small + 1.0 / 24
    series = series * -small + 1.0 / 6
    series = series * -small + 0.5
    series = series * -small + 1.0
    return tl.where(y > NEAR, (1.0 - tl.exp2(-LOG2E * y)) / tl.maximum(2.0 * rate, TINY), lag * series)


@triton.jit
def kappa_slope(rate, lag):
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
    direct = (tl.exp2(-LOG2E * far) * (1.0 + far) - 1.0) / (far * far)
    return 2.0 * lag * lag * tl.where(y > NEAR, direct, series)


@triton.jit
def after(rate, lag):
    """A lag >= 0."""
    return lag, tl.exp2(-LOG2E * rate * lag), kappa(rate, lag), kappa_slope(rate, lag)


@triton.jit
def joined(later, earlier):
    """One lag, and before it another."""
    lag, decay, grown, slope = later
    lag_0, decay_0, grown_0, slope_0 = earlier
    square = decay * decay
    return lag + lag_0, decay * decay_0, grown + square * grown_0, slope + square * (slope_0 - 2.0 * lag * grown_0)


@triton.jit
def between(later, earlier):
    """How much later times are than others, float64: the difference in float32, rounded once."""
    high, high_0 = later.to(tl.float32), earlier.to(tl.float32)
    low, low_0 = (later - high.to(tl.float64)).to(tl.float32), (earlier - high_0.to(tl.float64)).to(tl.float32)
    return (high - high_0) + (low - low_0)


@triton.jit
def load_model(numbers, head, H):
    """The noises of keys and of values, each (rate, process, key, query), 2 / nu, temperature and floor."""
    at = numbers + head
    keys = tl.load(at), tl.load(at + H), tl.load(at + 2 * H), tl.load(at + 3 * H)
    values = tl.load(at + 4 * H), tl.load(at + 5 * H), tl.load(at + 6 * H), tl.load(at + 7 * H)
    return keys, values, 2.0 / tl.load(at + 8 * H), tl.load(at + 9 * H), tl.load(at + 10 * H)


@triton.jit
def variances(spread, noise, ahead, CAUSAL: tl.constexpr):
    """After a lag, without the noise of the query and with it; what is ahead divided by the decay's square."""
    _lag, decay, grown, _slope = spread
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
def factors(spread, floor, ahead, CAUSAL: tl.constexpr):
    """What queries and keys are multiplied by before they are compared."""
    decay = spread[1]
    of_query, of_key = 1.0, decay + floor
    if not CAUSAL:
        of_query, of_key = tl.where(ahead, decay, 1.0), tl.where(ahead, 1.0 + floor * decay, of_key)
    return of_query, of_key


@triton.jit
def scored(
    gram, query_size, key_size, near, far, ahead, model,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Scores before temperature, and what they are made of: variances, twice the residual's size / nu, and the level.

    The size of a vector is half its square.
    """
    keys, values, per_nu, _temperature, floor = model
    of_query, of_key = factors(near, floor, ahead, CAUSAL)
    certain, whole = variances(near, keys, ahead, CAUSAL)
    apart = whole
    if not SHARED:
        certain, apart = variances(far, values, ahead, CAUSAL)
    if CAUSAL:
        residual = query_size + of_key * (of_key * key_size - gram)
    else:
        residual = of_query * (of_query * query_size - of_key * gram) + of_key * of_key * key_size
    residual = tl.maximum(residual, 0.0) * per_nu
    level = whole + residual
    if RATIONAL:
        score = -log2(level, PTX)
        if not SHARED:
            score += log2(whole, PTX) - log2(apart, PTX)
    else:
        score = -LOG2E * residual * reciprocal(whole, PTX) - log2(apart, PTX)
    if not CAUSAL:
        score -= tl.where(ahead, 2.0 * LOG2E * values[0] * far[0], 0.0)
    return score, whole, certain, apart, residual, level


@triton.jit
def precisions(found, far, ahead, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, PTX: tl.constexpr):
    """What tokens add to the total precision."""
    _score, whole, certain, _apart, residual, level = found
    weight = whole * reciprocal(level, PTX) if RATIONAL else tl.exp2(-LOG2E * residual * reciprocal(whole, PTX))
    if not CAUSAL:
        weight *= tl.where(ahead, far[1] * far[1], 1.0)
    return weight * reciprocal(certain, PTX)


@triton.jit
def pull_back(
    to_score, part, gram, query_size, key_size, near, ahead, model, found,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, VARIANCE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Gradients of what scores after temperature, and logarithms of precisions (`part`), are made of, in this order:
    gram; the sizes of queries and of keys; their factors; nu, times -nu; the variances of keys and of values;
    the latter without the query noise; and the logarithm of weights."""
    _keys, _values, per_nu, temperature, floor = model
    _score, whole, certain, apart, residual, level = found
    tempered = temperature * to_score
    to_weight, to_certain = tempered, 0.0
    if VARIANCE:
        to_weight += part
        to_certain = tl.where(certain > TINY, -part * reciprocal(certain, PTX), 0.0)
    inverse = reciprocal(whole, PTX)
    bounded = tl.where(whole > TINY, inverse, 0.0)
    if RATIONAL:
        to_residual = -to_weight * reciprocal(level, PTX)
        to_whole = to_residual
        if not SHARED:
            to_whole += to_weight * bounded
        elif VARIANCE:
            to_whole += part * bounded
    else:
        to_residual = -to_weight * inverse
        to_whole = -to_residual * residual * bounded
        if SHARED:
            to_whole -= tempered * bounded
    to_apart = to_whole
    if not SHARED:
        to_apart = tl.where(apart > TINY, -tempered * reciprocal(apart, PTX), 0.0)
    to_size = to_residual * per_nu
    of_query, of_key = factors(near, floor, ahead, CAUSAL)
    to_key = to_size * (of_key * key_size + (of_key * key_size - of_query * gram))
    to_query, to_query_size = to_key, to_size
    if not CAUSAL:
        to_query = to_size * (of_query * query_size + (of_query * query_size - of_key * gram))
        to_query_size = of_query * of_query * to_size
    to_gram = -of_key * to_size if CAUSAL else -of_query * of_key * to_size
    to_key_size = of_key * of_key * to_size
    to_nu = to_residual * residual
    return (
        to_gram, to_query_size, to_key_size, to_query, to_key, to_nu, to_whole, to_apart, to_certain, to_weight,
    )  # fmt: skip


@triton.jit
def of_noise(spread, noise, to_decay, to_whole, to_certain, ahead, CAUSAL: tl.constexpr):
    """Gradients of rate, process, key and query noise, given those of the decay and of the two variances."""
    lag, decay, grown, slope = spread
    _rate, process, key, query = noise
    square = decay * decay
    to_sure = to_whole + to_certain
    to_key, to_query, to_square = square * to_sure, to_whole, key * to_sure
    if not CAUSAL:
        to_key, to_query = tl.where(ahead, to_sure, to_key), tl.where(ahead, square * to_whole, to_whole)
        to_square = tl.where(ahead, query * to_whole, to_square)
    to_rate = process * slope * to_sure - lag * decay * (to_decay + 2.0 * decay * to_square)
    return to_rate, grown * to_sure, to_key, to_query
