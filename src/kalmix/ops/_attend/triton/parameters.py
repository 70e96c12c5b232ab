"""Gradients of the numbers of a head, in Triton: rates, noises and the floor, added up over the pairs of tiles.

Of pairs that meet directly, pair by pair. Of others, which meet where a block of keys ends, in two parts: `of_ways`, of
queries, for all that lies behind them since then; and `of_holding`, of keys, for what had become of them until then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._attend.triton.scores import of_noise

PARTS = tl.constexpr(4)  # of a sum along a row: the threads that have a row of a product, two columns in eight each


@triton.jit
def partly(x):
    """Sums of rows `[M, N]` in parts, `[M, PARTS]`: to add these up takes threads that wait for each other."""
    return tl.sum(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // (2 * PARTS), PARTS, 2]), 3), 1)


@triton.jit
def in_a_column(parts):
    return tl.sum(parts, 1)[:, None]


@triton.jit
def total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def of_pairs(sums, back, to_reach, near, lag, lag_0, ahead, model, SHARED: tl.constexpr, CAUSAL: tl.constexpr):
    """A tile's gradients of noises and of the floor, added to those of its queries: of pairs that meet directly."""
    _gram, _size, _size_0, to_key, _residual, to_whole, to_apart, to_sure, part = back
    rate, process, key, query, rate_0, process_0, key_0, query_0, floor = sums
    per_nu = model[2]
    to_decay, to_floor = -per_nu * to_key, -per_nu * to_key
    to_log = -lag_0[0] * to_reach
    if not CAUSAL:
        to_floor = tl.where(ahead, near[0] * to_floor, to_floor)
        to_log = tl.where(ahead, -2.0 * lag_0[0] * part - to_log, to_log)
    if SHARED:
        more = of_noise(lag, model[0], to_decay, -to_decay, to_apart, to_sure, ahead, CAUSAL)
        rate += partly(more[0] + to_log)
    else:
        more = of_noise(lag, model[0], to_decay, -to_decay, to_whole, to_whole, ahead, CAUSAL)
        rate += partly(more[0])
        other = of_noise(lag_0, model[1], 0.0, 0.0, to_apart, to_sure, ahead, CAUSAL)
        rate_0 += partly(other[0] + to_log)
        process_0 += partly(other[1])
        key_0 += partly(other[2])
        query_0 += partly(other[3])
    process += partly(more[1])
    key += partly(more[2])
    query += partly(more[3])
    return rate, process, key, query, rate_0, process_0, key_0, query_0, floor + partly(to_floor)


@triton.jit
def of_ways(sums, back, to_reach, holding, lag, lag_0, model, SHARED: tl.constexpr):
    """The same through what lies between queries and the blocks of keys they meet; `of_holding` has the rest."""
    _gram, _size, _size_0, to_key, _residual, to_whole, to_apart, to_sure, _part = back
    rate, process, key, query, rate_0, process_0, key_0, query_0, floor = sums
    per_nu = model[2]
    to_decay, to_log = partly(to_key * holding[1][1]), partly(to_reach)
    if SHARED:
        to_since, to_arrived = of_way(to_sure, holding[1][4])
        rate += by_rate(lag, model[0], to_since, to_arrived, per_nu * to_decay) - lag[0] * to_log
    else:
        to_since, to_arrived = of_way(to_whole, holding[1][4])
        rate += by_rate(lag, model[0], to_since, to_arrived, per_nu * to_decay)
        to_since_0, to_arrived_0 = of_way(to_sure, holding[2][4])
        rate_0 += by_rate(lag_0, model[1], to_since_0, to_arrived_0, 0.0) - lag_0[0] * to_log
        process_0 += lag_0[2] * to_since_0
        query_0 += partly(to_apart)
    process += lag[2] * to_since
    query += partly(to_apart if SHARED else to_whole)
    return rate, process, key, query, rate_0, process_0, key_0, query_0, floor - per_nu * partly(to_key)


@triton.jit
def of_way(to_sure, unsure):
    """Sums over keys of gradients of variances, and of these times what was unsure of keys when their block ended."""
    return partly(to_sure), partly(to_sure * unsure)


@triton.jit
def by_rate(lag, noise, to_since, to_arrived, to_decay):
    """The gradient of a rate through lags of tokens, of which sums of gradients are given: see `through`."""
    away, decay, slope = lag[0], lag[1], lag[3]
    return noise[1] * slope * to_since - away * decay * (2.0 * decay * to_arrived - to_decay)


@triton.jit
def of_holding(sums, back, asking, lag, lag_0, SHARED: tl.constexpr):
    """Gradients of the decay of keys when their block ends, for a nu of 2, and of what is then unsure of them."""
    to_decay, to_unsure, to_unsure_0 = sums
    _gram, _size, _size_0, to_key, _residual, to_whole, _apart, to_sure, _part = back
    decay, decay_0 = asking[1][1], asking[2][1]
    to_decay -= lag[1] * partly(to_key * decay)
    if SHARED:
        to_unsure += lag[1] * lag[1] * partly(to_sure * (decay * decay))
    else:
        to_unsure += lag[1] * lag[1] * partly(to_whole * (decay * decay))
        to_unsure_0 += lag_0[1] * lag_0[1] * partly(to_sure * (decay_0 * decay_0))
    return to_decay, to_unsure, to_unsure_0


@triton.jit
def by_noise(held, noise, to_unsure, to_decay, to_log):
    """Gradients of rate, process and key noise through what was unsure of keys when their block ended; see `note`."""
    lag, decay, grown, slope, _unsure = held
    square = decay * decay
    to_rate = (noise[1] * slope - 2.0 * lag * noise[2] * square) * to_unsure - lag * (decay * to_decay + to_log)
    return total(to_rate), total(grown * to_unsure), total(square * to_unsure)
