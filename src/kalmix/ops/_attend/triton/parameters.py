"""Gradients of the numbers of a head, in Triton: rates, noises and the floor, added up over the pairs of tiles.

Of pairs that meet directly, pair by pair. Of others, which meet where a block of keys ends, in two parts: `of_ways`, of
queries, for all that lies behind them since then; and `of_holding`, of keys, for what had become of them until then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._attend.triton.scores import noise_vjp

PARTIAL_SUMS = tl.constexpr(
    4
)  # of a sum along a row: the threads that have a row of a product, two columns in eight each


@triton.jit
def partial_sums(x):
    """Sums of rows `[M, N]` in parts, `[M, PARTS]`: to add these up takes threads that wait for each other."""
    return tl.sum(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // (2 * PARTIAL_SUMS), PARTIAL_SUMS, 2]), 3), 1)


@triton.jit
def sum_to_column(parts):
    return tl.sum(parts, 1)[:, None]


@triton.jit
def sum_all(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def add_pair_grads(
    sums, grads, grad_decayed, key_var, key_lag, value_lag, future, params, SHARED: tl.constexpr, CAUSAL: tl.constexpr
):
    """A tile's gradients of noises and of the floor, added to those of its queries: of pairs that meet directly."""
    grad_factor, grad_key_total = grads[3], grads[5]
    grad_value_total, grad_value_state, grad_log_precision = grads[6], grads[7], grads[8]
    rate, process, key, query, value_rate, value_process, value_key, value_query, floor = sums
    two_over_nu = params[2]
    grad_decay, grad_floor = -two_over_nu * grad_factor, -two_over_nu * grad_factor
    grad_log_decay = -value_lag[0] * grad_decayed
    if not CAUSAL:
        grad_floor = tl.where(future, key_var[0] * grad_floor, grad_floor)
        grad_log_decay = tl.where(future, -2.0 * value_lag[0] * grad_log_precision - grad_log_decay, grad_log_decay)
    if SHARED:
        key_grads = noise_vjp(
            key_lag, params[0], grad_decay, -grad_decay, grad_value_total, grad_value_state, future, CAUSAL
        )
        rate += partial_sums(key_grads[0] + grad_log_decay)
    else:
        key_grads = noise_vjp(
            key_lag, params[0], grad_decay, -grad_decay, grad_key_total, grad_key_total, future, CAUSAL
        )
        rate += partial_sums(key_grads[0])
        value_grads = noise_vjp(value_lag, params[1], 0.0, 0.0, grad_value_total, grad_value_state, future, CAUSAL)
        value_rate += partial_sums(value_grads[0] + grad_log_decay)
        value_process += partial_sums(value_grads[1])
        value_key += partial_sums(value_grads[2])
        value_query += partial_sums(value_grads[3])
    process += partial_sums(key_grads[1])
    key += partial_sums(key_grads[2])
    query += partial_sums(key_grads[3])
    return (
        rate, process, key, query, value_rate, value_process, value_key, value_query, floor + partial_sums(grad_floor),
    )  # fmt: skip


@triton.jit
def add_query_side_grads(sums, grads, grad_decayed, key_tokens, key_lag, value_lag, params, SHARED: tl.constexpr):
    """The same through what lies between queries and the blocks of keys they meet; `of_holding` has the rest."""
    grad_factor, grad_key_total = grads[3], grads[5]
    grad_value_total, grad_value_state = grads[6], grads[7]
    rate, process, key, query, value_rate, value_process, value_key, value_query, floor = sums
    two_over_nu = params[2]
    grad_decay, grad_log_decay = partial_sums(grad_factor * key_tokens[1][1]), partial_sums(grad_decayed)
    if SHARED:
        grad_since_block, grad_at_block = variance_grads(grad_value_state, key_tokens[1][4])
        rate += (
            rate_grad(key_lag, params[0], grad_since_block, grad_at_block, two_over_nu * grad_decay)
            - key_lag[0] * grad_log_decay
        )
    else:
        grad_since_block, grad_at_block = variance_grads(grad_key_total, key_tokens[1][4])
        rate += rate_grad(key_lag, params[0], grad_since_block, grad_at_block, two_over_nu * grad_decay)
        value_grad_since_block, value_grad_at_block = variance_grads(grad_value_state, key_tokens[2][4])
        value_rate += (
            rate_grad(value_lag, params[1], value_grad_since_block, value_grad_at_block, 0.0)
            - value_lag[0] * grad_log_decay
        )
        value_process += value_lag[2] * value_grad_since_block
        value_query += partial_sums(grad_value_total)
    process += key_lag[2] * grad_since_block
    query += partial_sums(grad_value_total if SHARED else grad_key_total)
    return (
        rate, process, key, query, value_rate, value_process, value_key, value_query,
        floor - two_over_nu * partial_sums(grad_factor),
    )  # fmt: skip


@triton.jit
def variance_grads(grad_state, key_state):
    """Sums over keys of gradients of variances, and of these times what was unsure of keys when their block ended."""
    return partial_sums(grad_state), partial_sums(grad_state * key_state)


@triton.jit
def rate_grad(lag, noise, grad_since_block, grad_at_block, grad_decay):
    """The gradient of a rate through lags of tokens, of which sums of gradients are given: see `through`."""
    distance, decay, slope = lag[0], lag[1], lag[3]
    return noise[1] * slope * grad_since_block - distance * decay * (2.0 * decay * grad_at_block - grad_decay)


@triton.jit
def add_key_side_grads(sums, grads, query_tokens, key_lag, value_lag, SHARED: tl.constexpr):
    """Gradients of the decay of keys when their block ends, for a nu of 2, and of what is then unsure of them."""
    grad_decay, grad_key_state, grad_value_key_state = sums
    grad_factor, grad_key_total = grads[3], grads[5]
    grad_value_state = grads[7]
    decay, value_decay = query_tokens[1][1], query_tokens[2][1]
    grad_decay -= key_lag[1] * partial_sums(grad_factor * decay)
    if SHARED:
        grad_key_state += key_lag[1] * key_lag[1] * partial_sums(grad_value_state * (decay * decay))
    else:
        grad_key_state += key_lag[1] * key_lag[1] * partial_sums(grad_key_total * (decay * decay))
        grad_value_key_state += (
            value_lag[1] * value_lag[1] * partial_sums(grad_value_state * (value_decay * value_decay))
        )
    return grad_decay, grad_key_state, grad_value_key_state


@triton.jit
def key_side_noise_grads(key_lag, noise, grad_key_state, grad_decay, grad_log_decay):
    """Gradients of rate, process and key noise through what was unsure of keys when their block ended; see `note`."""
    lag, decay, accumulated, slope, _key_state = key_lag
    square = decay * decay
    grad_rate = (noise[1] * slope - 2.0 * lag * noise[2] * square) * grad_key_state - lag * (
        decay * grad_decay + grad_log_decay
    )
    return sum_all(grad_rate), sum_all(accumulated * grad_key_state), sum_all(square * grad_key_state)
