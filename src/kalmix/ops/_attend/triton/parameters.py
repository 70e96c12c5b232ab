"""Gradients of the parameters of a head (rates, noises and floor), summed over the pairs of tiles, in Triton.

Pairs with a lag of their own contribute one by one. For other pairs, the lag is that of the key to the end of its block
and that from there to the query. `add_query_side_grads` sums the gradients through the latter, `add_key_side_grads` and
`key_side_noise_grads` those through the former.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._attend.triton.scores import noise_vjp

PARTIAL_SUMS = tl.constexpr(4)  # per row: the threads that share a row of a product


@triton.jit
def partial_sums(x):
    """Sum rows `[M, N]` to `[M, PARTIAL_SUMS]`, within threads; complete sums would need synchronisation."""
    return tl.sum(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // (2 * PARTIAL_SUMS), PARTIAL_SUMS, 2]), 3), 1)


@triton.jit
def sum_to_column(parts):
    """Sum the partial sums of rows to a column `[M, 1]`."""
    return tl.sum(parts, 1)[:, None]


@triton.jit
def sum_all(x):
    """Sum all elements."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def add_pair_grads(
    sums, grads, grad_decayed, key_var, key_lag, value_lag, future, params, SHARED: tl.constexpr, CAUSAL: tl.constexpr
):
    """Add the gradients of noises and floor from a tile of pairs that have lags of their own."""
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
        grad_value_key, grad_value_query, grad_precision_state = grads[9]
        square = value_lag[1] * value_lag[1]
        if not CAUSAL:
            square = tl.where(future, 1.0, square)
        value_key += partial_sums(grad_value_key + square * grad_precision_state)
        value_query += partial_sums(grad_value_query)
    process += partial_sums(key_grads[1])
    key += partial_sums(key_grads[2])
    query += partial_sums(key_grads[3])
    return (
        rate, process, key, query, value_rate, value_process, value_key, value_query, floor + partial_sums(grad_floor),
    )  # fmt: skip


@triton.jit
def add_query_side_grads(sums, grads, grad_decayed, key_tokens, key_lag, value_lag, params, SHARED: tl.constexpr):
    """Add the gradients of noises and floor through the lag from the end of the key's block to the query."""
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
        value_key += partial_sums(grads[9][0])
        value_query += partial_sums(grads[9][1])
    process += key_lag[2] * grad_since_block
    query += partial_sums(grad_value_total if SHARED else grad_key_total)
    return (
        rate, process, key, query, value_rate, value_process, value_key, value_query,
        floor - two_over_nu * partial_sums(grad_factor),
    )  # fmt: skip


@triton.jit
def variance_grads(grad_state, key_state):
    """Sum the gradients of variances over keys, and the same times the variance of keys at the end of their block."""
    return partial_sums(grad_state), partial_sums(grad_state * key_state)


@triton.jit
def rate_grad(lag, noise, grad_since_block, grad_at_block, grad_decay):
    """Compute the gradient of a rate through the lags of queries, from sums over keys; see `chained_variances`."""
    distance, decay, slope = lag[0], lag[1], lag[3]
    return noise[1] * slope * grad_since_block - distance * decay * (2.0 * decay * grad_at_block - grad_decay)


@triton.jit
def add_key_side_grads(sums, grads, query_tokens, key_lag, value_lag, SHARED: tl.constexpr, VARIANCE: tl.constexpr):
    """Add the gradients of the decay (for nu = 2) and variance of keys at the end of their block.

    The last sum is the part of the gradient of the variance of values that goes through the precision.
    """
    grad_decay, grad_key_state, grad_value_key_state, grad_precision_state = sums
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
        if VARIANCE:
            grad_precision_state += (
                value_lag[1] * value_lag[1] * partial_sums(grads[9][2] * (value_decay * value_decay))
            )
    return grad_decay, grad_key_state, grad_value_key_state, grad_precision_state


@triton.jit
def key_side_noise_grads(key_lag, noise, grad_key_state, grad_key_noise, grad_decay, grad_log_decay):
    """Compute the gradients of rate, process and key noise through the state of keys at the end of their block.

    `grad_key_noise` is the gradient of the state through which the key noise gets its gradient.
    """
    lag, decay, accumulated, slope, _key_state = key_lag
    square = decay * decay
    grad_rate = (noise[1] * slope - 2.0 * lag * noise[2] * square) * grad_key_state - lag * (
        decay * grad_decay + grad_log_decay
    )
    return sum_all(grad_rate), sum_all(accumulated * grad_key_state), sum_all(square * grad_key_noise)
