"""Triton kernels for the gradients of keys, values, gains and decays, given the adjoints of H and U; see `backward`.

Two launches process all tiles in parallel: `value_grads` uses the adjoint of U, then `key_grads` adds the gradients
through H.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._ridge.triton.solve import (
    load_block,
    load_token_scalars,
    locate_entry,
    locate_exit,
    log_decay_between,
    program_tile,
)
from kalmix.ops._shared.triton.tiles import UNSPECIALIZED, load_per_token, load_rows, matmul, store_rows


@triton.jit
def anticausal_decays(
    log_decays, log_decay_remainders, gain_values, slot, SIZE: tl.constexpr, DECAY: tl.constexpr, GAIN: tl.constexpr
):
    """Return A(t, s) `[s, t]` (0 for t < s), gains and A(exit, s) of a tile."""
    t = tl.arange(0, SIZE)
    decays = tl.where(t[:, None] <= t[None, :], 1.0, 0.0)
    gain, exit_decay = tl.full([SIZE], 1.0, tl.float32), tl.full([SIZE], 1.0, tl.float32)
    if DECAY:
        decays = tl.exp(
            tl.where(
                t[:, None] <= t[None, :],
                -log_decay_between(log_decays, log_decay_remainders, slot, SIZE),
                float("-inf"),
            )
        )
        high, low = load_token_scalars(log_decays, slot, SIZE), load_token_scalars(log_decay_remainders, slot, SIZE)
        end = slot * SIZE + SIZE - 1
        exit_decay = tl.exp((tl.load(log_decays + end) - high) + (tl.load(log_decay_remainders + end) - low))
    if GAIN:
        gain = load_token_scalars(gain_values, slot, SIZE)
    return decays, gain, exit_decay


@triton.jit
def load_reader(
    q, solution, share, q_token, G, count, dim, K: tl.constexpr, SIZE: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """Return the vectors that U is read with: mix x + (1 - mix) q."""
    reader = load_rows(solution, G * K, count, dim, K, SIZE)
    if MIX:
        query = load_rows(q, q_token, count, dim, K, SIZE).to(tl.float32)
        reader = (query + share[:, None] * (reader.to(tl.float32) - query)).to(solution.dtype.element_ty)
    return reader


@triton.jit(do_not_specialize=UNSPECIALIZED)
def value_grads(
    q, k, v, log_decays, log_decay_remainders, tile_decays, gain_values, mix, crosses, solution, grad_mean, read_terms,
    adjoints, grad_k, grad_v, grad_gain, grad_log_decay, tile_table, length, tiles, q_token, q_head, k_token, k_head,
    v_token, v_head, m_token, m_head, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VALUE_BLOCK: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAY: tl.constexpr, GAIN: tl.constexpr, MIX: tl.constexpr, NO_PRIOR: tl.constexpr,
    FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dv of a tile's tokens, and the parts of dk, dgain and dlog_decay that flow through U."""
    DTYPE: tl.constexpr = adjoints.dtype.element_ty
    KEY_BLOCK: tl.constexpr = min(P, VALUE_BLOCK)
    head, token, count, row, slot = program_tile(tile_table, length, tiles, G, SIZE, PACKED)
    if count <= 0:
        return
    t, dim = tl.arange(0, SIZE), tl.arange(0, P)
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    v += token * v_token + head * v_head
    grad_mean += token * m_token + head * m_head
    solution += row * K
    entry, has_entry, exit_slot, has_exit = slot, None, slot, None
    if NO_PRIOR:
        entry, has_entry = locate_entry(tile_table, slot, token, G, SIZE)
    if not FINAL:
        exit_slot, has_exit = locate_exit(tile_table, slot, token, G, SIZE)
    crosses += entry * K * V
    adjoints += exit_slot * K * V
    state_dot = 0.0
    decays, gain, exit_decay = anticausal_decays(log_decays, log_decay_remainders, gain_values, slot, SIZE, DECAY, GAIN)
    share = tl.full([SIZE], 1.0, tl.float32)
    if MIX:
        share = load_per_token(mix + row, count, G, SIZE)
    key = load_rows(k, k_token, count, dim, K, SIZE)
    reader = load_reader(q, solution, share, q_token, G, count, dim, K, SIZE, MIX)
    scores = matmul(key, tl.trans(reader), PRECISION) * decays
    value_scores = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, V, VALUE_BLOCK):
        column = start + tl.arange(0, VALUE_BLOCK)
        grad = load_rows(grad_mean, m_token, count, column, V, SIZE)
        value_scores = matmul(load_rows(v, v_token, count, column, V, SIZE), tl.trans(grad), PRECISION, value_scores)
        grad_value = matmul(key, load_block(adjoints, dim, column, K, V, has_exit), PRECISION) * exit_decay[:, None]
        grad_value = matmul(scores.to(DTYPE), grad, PRECISION, grad_value)
        store_rows(grad_v + row * V, G * V, count, column, grad_value * gain[:, None], V, SIZE)
        if DECAY:
            state_product = load_block(crosses, dim, column, K, V, has_entry).to(tl.float32)
            state_product *= load_block(adjoints, dim, column, K, V, has_exit).to(tl.float32)
            state_dot += tl.sum(tl.sum(state_product, 1), 0)
    grad_decay = tl.zeros([SIZE], tl.float32)
    if DECAY:
        pairs = tl.where(t[:, None] < t[None, :], value_scores * scores * gain[:, None], 0.0)
        until_mask = tl.where(t[:, None] >= t[None, :], 1.0, 0.0).to(DTYPE)
        high = pairs.to(DTYPE)
        pairs = matmul(
            (pairs - high.to(tl.float32)).to(DTYPE), until_mask, PRECISION, matmul(high, until_mask, PRECISION)
        )
        grad_decay = tl.sum(tl.where(t[:, None] < t[None, :], pairs, 0.0), 0)
    value_scores = (value_scores * decays).to(DTYPE)
    exit_dots, grad_gains = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for start in range(0, K, KEY_BLOCK):
        dims = start + tl.arange(0, KEY_BLOCK)
        grad_key = tl.zeros([SIZE, KEY_BLOCK], tl.float32)
        for value_start in range(0, V, VALUE_BLOCK):
            column = value_start + tl.arange(0, VALUE_BLOCK)
            block = load_block(adjoints, dims, column, K, V, has_exit)
            grad_key = matmul(load_rows(v, v_token, count, column, V, SIZE), tl.trans(block), PRECISION, grad_key)
        grad_key *= exit_decay[:, None]
        key_rows = load_rows(k, k_token, count, dims, K, SIZE).to(tl.float32)
        exit_dots += tl.sum(grad_key * key_rows, 1)
        grad_key = matmul(
            value_scores, load_reader(q, solution, share, q_token, G, count, dims, K, SIZE, MIX), PRECISION, grad_key
        )
        grad_gains += tl.sum(grad_key * key_rows, 1)
        store_rows(grad_k + row * K, G * K, count, dims, gain[:, None] * grad_key, K, SIZE)
    if GAIN:
        tl.store(grad_gain + row + t * G, grad_gains, mask=t < count)
    if DECAY:
        entry_dots = load_token_scalars(read_terms, slot, SIZE)
        exit_dots *= gain
        grad_decay += tl.cumsum(entry_dots, 0, reverse=True) + (tl.cumsum(exit_dots, 0) - exit_dots)
        tl.store(grad_log_decay + row + t * G, grad_decay + tl.load(tile_decays + slot) * state_dot, mask=t < count)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_grads(
    k, log_decays, log_decay_remainders, entry_decays, tile_decays, gain_values, grams, norms, solution, adjoint,
    norm_weights, entry_terms, adjoints, grad_k, grad_gain, grad_log_decay, tile_table, length, tiles, k_token, k_head,
    G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VALUE_BLOCK: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAY: tl.constexpr, GAIN: tl.constexpr, ADAPTIVE: tl.constexpr, NO_PRIOR: tl.constexpr,
    FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk, dgain and dlog_decay of a tile's tokens; adds to the parts that `value_grads` stored."""
    DTYPE: tl.constexpr = adjoint.dtype.element_ty
    KEY_BLOCK: tl.constexpr = min(P, VALUE_BLOCK)
    head, token, count, row, slot = program_tile(tile_table, length, tiles, G, SIZE, PACKED)
    if count <= 0:
        return
    t, dim = tl.arange(0, SIZE), tl.arange(0, P)
    k += token * k_token + head // SHARE * k_head
    solution += row * K
    adjoint += row * K
    grad_k += row * K
    entry, has_entry, exit_slot, has_exit = slot, None, slot, None
    if NO_PRIOR:
        entry, has_entry = locate_entry(tile_table, slot, token, G, SIZE)
    if not FINAL:
        exit_slot, has_exit = locate_exit(tile_table, slot, token, G, SIZE)
    grams += entry * K * K
    adjoints += exit_slot * K * K
    state_dot = 0.0
    decays, gain, exit_decay = anticausal_decays(log_decays, log_decay_remainders, gain_values, slot, SIZE, DECAY, GAIN)
    entry_decay = load_token_scalars(entry_decays, slot, SIZE) if DECAY else tl.full([SIZE], 1.0, tl.float32)
    key = load_rows(k, k_token, count, dim, K, SIZE)
    x = load_rows(solution, G * K, count, dim, K, SIZE)
    y = load_rows(adjoint, G * K, count, dim, K, SIZE)
    by_x = matmul(key, tl.trans(x), PRECISION)
    by_y = matmul(key, tl.trans(y), PRECISION)
    pair_terms = tl.sum(decays * by_x * by_y * gain[:, None], 0)
    by_x, by_y = (-0.5 * decays * by_x).to(DTYPE), (-0.5 * decays * by_y).to(DTYPE)
    key_weights, entry_weights = by_x, entry_decay
    if ADAPTIVE:
        norm_weight = load_token_scalars(norm_weights, slot, SIZE)
        pairs = matmul((decays * norm_weight[None, :]).to(DTYPE), tl.trans(decays.to(DTYPE)), PRECISION)
        entry_weights = tl.sum(tl.where(t[None, :] == 0, pairs * entry_decay[None, :], 0.0), 1)  # via token 0
        key_weights = (pairs * matmul(key, tl.trans(key), PRECISION) * gain[None, :]).to(DTYPE)
    exit_dots, grad_gains = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for start in range(0, K, KEY_BLOCK):
        dims = start + tl.arange(0, KEY_BLOCK)
        entry_gram = load_block(grams, dim, dims, K, K, has_entry)
        if DECAY:
            state_product = load_block(adjoints, dim, dims, K, K, has_exit).to(tl.float32)
            state_product *= load_block(grams, dim, dims, K, K, has_entry).to(tl.float32)
            state_dot += tl.sum(tl.sum(state_product, 1), 0)
        grad_key = matmul(key, load_block(adjoints, dim, dims, K, K, has_exit), PRECISION) * exit_decay[:, None]
        key_rows = load_rows(k, k_token, count, dims, K, SIZE).to(tl.float32)
        exit_dots += tl.sum(grad_key * key_rows, 1)
        if ADAPTIVE:
            grad_key += entry_weights[:, None] * matmul(key, entry_gram, PRECISION)
            grad_key = matmul(key_weights, load_rows(k, k_token, count, dims, K, SIZE), PRECISION, grad_key)
        grad_key = matmul(by_y, load_rows(solution, G * K, count, dims, K, SIZE), PRECISION, grad_key)
        grad_key = matmul(by_x, load_rows(adjoint, G * K, count, dims, K, SIZE), PRECISION, grad_key)
        grad_gains += tl.sum(grad_key * key_rows, 1)
        grad_key = 2.0 * gain[:, None] * grad_key + load_rows(grad_k, G * K, count, dims, K, SIZE).to(tl.float32)
        store_rows(grad_k, G * K, count, dims, grad_key, K, SIZE)
    if GAIN:
        tl.store(grad_gain + row + t * G, grad_gains + load_per_token(grad_gain + row, count, G, SIZE), mask=t < count)
    if DECAY:
        token_terms = 0.0 - pair_terms - load_token_scalars(entry_terms, slot, SIZE) - gain * grad_gains
        if ADAPTIVE:
            norm = load_token_scalars(norms, slot, SIZE)
            token_terms += load_token_scalars(norm_weights, slot, SIZE) * norm * norm
        grad_decay = tl.cumsum(token_terms, 0, reverse=True) + load_per_token(grad_log_decay + row, count, G, SIZE)
        grad_decay += tl.sum(gain * exit_dots, 0) + tl.load(tile_decays + slot) * state_dot
        tl.store(grad_log_decay + row + t * G, grad_decay, mask=t < count)
