"""Triton kernels of `dense` for vector decays (one per key): a tile is processed token by token.

The products of `scalar_decay` would need one product per level of halves, with as many decays as keys. Only products
with whole tiles remain: with the covariance, and at the exit of a tile. The stages are those of `scalar_decay`.

If `PAIRED`, process noise enters each pair of keys (2 j, 2 j + 1) along one direction, `noise_axis`: as 2 x 2 blocks,
stored as two diagonals, of a key with itself and with its partner (key index ^ 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._dense.triton.primitives import (
    UNSPECIALIZED_ARGUMENTS,
    decay_covariance,
    load_noise_blocks,
    scan_options,
    split_matmul,
    swap_pairs,
    tile_in_chunk,
)
from kalmix.ops._dense.triton.row_partition import load_float32
from kalmix.ops._shared.triton.tiles import locate_program, locate_tile


def options(stage: str, decay_axes: int, padded: int, terms: int) -> dict[str, int]:
    """Return the constants and launch options of a stage; `finish_backward` steps a covariance through a chunk."""
    if stage == "finish_backward":
        return scan_options(padded, 3 if terms else 0)
    return {"num_warps": max(1, padded // 128)} | ({"TERMS": terms} if stage == "prepare_backward" else {})


@triton.jit
def _load_decay(log_decay, position, dim, K: tl.constexpr):
    """Load the decays of one token, `[P]`."""
    return tl.exp(tl.load(log_decay + position * K + dim, mask=dim < K, other=0.0).to(tl.float32))


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def prepare(
    q, k, obs_noise, process_noise, noise_axis, log_decay, keys, queries, noise_keys, innovation_cov, tile_decays,
    tile_table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Compute decays, noises and the innovation covariance of a tile that do not depend on the incoming covariance."""
    index, head, _unused = locate_program(G, 1)
    token, count = tile_in_chunk(tile_table, index, length, tiles, TILE, CHUNK, PACKED)
    if count <= 0:
        return
    dim, row = tl.arange(0, P), tl.arange(0, TILE)
    slot = index.to(tl.int64) * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    keys += slot * (TILE * P) + dim[None, :]
    queries += slot * (TILE * P) + dim[None, :]
    innovation_cov += slot * (TILE * TILE)
    entry_decay = tl.full([P], 1.0, tl.float32)
    noise = tl.zeros([P], tl.float32)
    pair_noise = tl.zeros([P], tl.float32)  # of a key with its partner
    decayed_noise = tl.zeros([TILE, P], tl.float32)
    column, padding = tl.arange(0, TILE)[None, :], row[:, None] >= count  # missing tokens have no effect
    identity = (row[:, None] == column).to(tl.float32)
    tl.store(innovation_cov + row[:, None] * TILE + column, identity, mask=padding | (column >= count))
    tl.store(keys + row[:, None] * P, decayed_noise, mask=padding & (dim >= 0)[None, :])
    if VARIANCE:
        tl.store(queries + row[:, None] * P, decayed_noise, mask=padding & (dim >= 0)[None, :])
    for t in range(count):
        position = (token + t) * G + head
        key = tl.load(k + t * k_token + dim, mask=dim < K, other=0.0).to(tl.float32)
        decay = _load_decay(log_decay, position, dim, K)
        entry_decay *= decay
        new_noise, new_pair_noise = load_noise_blocks(process_noise, noise_axis, position, dim, K, PAIRED)
        noise = decay * decay * noise + new_noise
        noise_key = noise * key
        if PAIRED:
            pair_noise = decay * decay * pair_noise + new_pair_noise
            noise_key += pair_noise * load_float32(k + t * k_token, dim ^ 1, K, True)
        is_token = row == t
        decayed_noise = tl.where(is_token[:, None], noise_key[None, :], decayed_noise * decay[None, :])
        row_values = tl.sum(decayed_noise * key[None, :], 1)
        row_values = tl.where(is_token, row_values + tl.load(obs_noise + position).to(tl.float32), row_values)
        tl.store(innovation_cov + t * TILE + row, row_values, mask=row <= t)
        tl.store(innovation_cov + row * TILE + t, row_values, mask=row < t)
        tl.store(keys + t * P, (key * entry_decay)[None, :])
        if VARIANCE:
            query = tl.load(q + t * q_token + dim, mask=dim < K, other=0.0).to(tl.float32)
            tl.store(queries + t * P, (query * entry_decay)[None, :])
    tl.store(noise_keys + slot * (TILE * P) + row[:, None] * P + dim[None, :], decayed_noise)
    tile_decays += slot * (2 + PAIRED) * P + dim
    tl.store(tile_decays, entry_decay)
    tl.store(tile_decays + P, noise)
    if PAIRED:
        tl.store(tile_decays + 2 * P, pair_noise)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def gains(
    q, k, obs_noise, process_noise, noise_axis, log_decay, innovation_cov, cov_keys, cov_queries, gain, rounded_gain,
    innovation_var, read_var, tile_table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Compute the gains, innovation variances and read-out variances of a tile."""
    index, head, _unused = locate_program(G, 1)
    token, count = tile_in_chunk(tile_table, index, length, tiles, TILE, CHUNK, PACKED)
    dim, row = tl.arange(0, P), tl.arange(0, TILE)
    slot = index.to(tl.int64) * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    cov_keys += slot * (TILE * P) + dim
    cov_queries += slot * (TILE * P) + dim
    entry_decay = tl.full([P], 1.0, tl.float32)
    noise = tl.zeros([P], tl.float32)
    pair_noise = tl.zeros([P], tl.float32)
    decayed_gains = tl.zeros([TILE, P], tl.float32)  # decayed gains of earlier tokens
    variances = tl.zeros([TILE], tl.float32)
    for t in range(count):
        position = (token + t) * G + head
        key = tl.load(k + t * k_token + dim, mask=dim < K, other=0.0).to(tl.float32)
        decay = _load_decay(log_decay, position, dim, K)
        entry_decay *= decay
        new_noise, new_pair_noise = load_noise_blocks(process_noise, noise_axis, position, dim, K, PAIRED)
        noise = decay * decay * noise + new_noise
        decayed_gains *= decay[None, :]
        overlap = variances * tl.sum(decayed_gains * key[None, :], 1)
        cov_key = entry_decay * tl.load(cov_keys + t * P) + noise * key - tl.sum(decayed_gains * overlap[:, None], 0)
        if PAIRED:
            pair_noise = decay * decay * pair_noise + new_pair_noise
            cov_key += pair_noise * load_float32(k + t * k_token, dim ^ 1, K, True)
        variance = tl.load(obs_noise + position).to(tl.float32) + tl.maximum(tl.sum(key * cov_key, 0), 0.0)
        token_gain = cov_key / variance
        tl.store(gain + position * K + dim, token_gain, mask=dim < K)
        if gain.dtype != rounded_gain.dtype:
            tl.store(rounded_gain + position * K + dim, token_gain.to(rounded_gain.dtype.element_ty), mask=dim < K)
        tl.store(innovation_var + position, variance)
        decayed_gains = tl.where((row == t)[:, None], token_gain[None, :], decayed_gains)
        variances = tl.where(row == t, variance, variances)
        if VARIANCE:
            query = tl.load(q + t * q_token + dim, mask=dim < K, other=0.0).to(tl.float32)
            overlap = variances * tl.sum(decayed_gains * query[None, :], 1)
            cov_query = (
                entry_decay * tl.load(cov_queries + t * P) + noise * query - tl.sum(decayed_gains * overlap[:, None], 0)
            )
            if PAIRED:
                cov_query += pair_noise * load_float32(q + t * q_token, dim ^ 1, K, True)
            tl.store(read_var + position, tl.maximum(tl.sum(query * cov_query, 0), 0.0))


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def prepare_backward(
    q, k, log_decay, gain, innovation_var, grad_gain, keys, exit_gains, tile_terms, queries, coefficients, tile_decays,
    tile_table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Compute W, Y and the coefficients of key, gradient and query with earlier gains of a tile."""
    index, head, _unused = locate_program(G, 1)
    token, count = tile_in_chunk(tile_table, index, length, tiles, TILE, CHUNK, PACKED)
    if count <= 0:
        return
    dim, row = tl.arange(0, P), tl.arange(0, TILE)
    slot = index.to(tl.int64) * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    flat = slot * (TILE * P) + row[:, None] * P + dim[None, :]
    coefficients += slot * (3 * TILE * TILE)
    square, square_t = row[:, None] * TILE + row[None, :], row[None, :] * TILE + row[:, None]
    padding_rows, zeros = row[:, None] >= count, tl.zeros([TILE, TILE], tl.float32)
    for index_ in tl.static_range(3):
        tl.store(coefficients + index_ * TILE * TILE + square, zeros, mask=padding_rows)
    entry_decay = tl.full([P], 1.0, tl.float32)
    decayed_gains = tl.zeros([TILE, P], tl.float32)  # remaining parts of the gains of earlier tokens
    padding = padding_rows & (dim >= 0)[None, :]
    tl.store(keys + flat, decayed_gains, mask=padding)
    tl.store(tile_terms + flat, decayed_gains, mask=padding)
    if VARIANCE:
        tl.store(queries + flat, decayed_gains, mask=padding)
    for t in range(count):
        position = (token + t) * G + head
        key = tl.load(k + t * k_token + dim, mask=dim < K, other=0.0).to(tl.float32)
        token_gain = tl.load(gain + position * K + dim, mask=dim < K, other=0.0)
        grad_token_gain = tl.load(grad_gain + position * K + dim, mask=dim < K, other=0.0).to(tl.float32)
        direct_grad = (grad_token_gain - tl.sum(grad_token_gain * token_gain, 0) * key) / tl.load(
            innovation_var + position
        )
        decay = _load_decay(log_decay, position, dim, K)
        entry_decay *= decay
        decayed_gains *= decay[None, :]
        key_gains = tl.sum(decayed_gains * key[None, :], 1)
        direct_gains = tl.sum(decayed_gains * direct_grad[None, :], 1)
        decayed_gains = tl.where(
            (row == t)[:, None], token_gain[None, :], decayed_gains - key_gains[:, None] * token_gain[None, :]
        )
        dest = slot * (TILE * P) + t * P + dim
        tl.store(keys + dest, entry_decay * key)
        tl.store(tile_terms + dest, entry_decay * direct_grad)
        tl.store(coefficients + t * TILE + row, key_gains)
        tl.store(coefficients + (TILE + t) * TILE + row, direct_gains)
        if VARIANCE:
            query = tl.load(q + t * q_token + dim, mask=dim < K, other=0.0).to(tl.float32)
            tl.store(coefficients + (2 * TILE + t) * TILE + row, tl.sum(decayed_gains * query[None, :], 1))
            tl.store(queries + dest, entry_decay * query)
    tl.store(exit_gains + flat, decayed_gains)
    tl.store(tile_decays + slot * P + dim, entry_decay)
    tl.debug_barrier()  # other threads load these stores
    entry_keys = tl.load(keys + flat)
    half_term = 0.5 * (
        tl.load(tile_terms + flat) - split_matmul(tl.load(coefficients + TILE * TILE + square), entry_keys, TERMS)
    )
    tl.store(tile_terms + flat, half_term - split_matmul(tl.load(coefficients + square_t), half_term, TERMS))
    if VARIANCE:
        query_gains = tl.load(coefficients + 2 * TILE * TILE + square)
        tl.store(queries + flat, tl.load(queries + flat) - split_matmul(query_gains, entry_keys, TERMS))


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def token_vjp(
    q, k, process_noise, noise_axis, log_decay, gain, innovation_var, grad_gain, grad_var, coefficients, adjoint_gains,
    adjoint_diags, dk, dq, grad_obs, grad_process, grad_axis, grad_cov_keys, weighted_queries, scaled_gains,
    accumulated_noise, diag_flows, tile_table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Compute du of a tile's tokens, gradients of the noises, and the parts of dk and dq from within the tile."""
    index, head, _unused = locate_program(G, 1)
    token, count = tile_in_chunk(tile_table, index, length, tiles, TILE, CHUNK, PACKED)
    if count <= 0:
        return
    dim, row = tl.arange(0, P), tl.arange(0, TILE)
    slot = index.to(tl.int64) * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    base = slot * (TILE * P) + dim
    square = slot * (TILE * P) + row[:, None] * P + dim[None, :]
    coefficients += slot * (3 * TILE * TILE) + row

    adjoint_diags += slot * (1 + PAIRED) * P + dim
    adjoint_diag = tl.load(adjoint_diags)
    adjoint_pairs = tl.load(adjoint_diags + PAIRED * P)  # adjoint of a key with its partner
    adjoint_gain = tl.load(adjoint_gains + square)  # adjoint times the remaining part of every gain
    for reverse_index in range(count):
        t = count - 1 - reverse_index
        position = (token + t) * G + head
        key = tl.load(k + t * k_token + dim, mask=dim < K, other=0.0).to(tl.float32)
        token_gain = tl.load(gain + position * K + dim, mask=dim < K, other=0.0)
        grad_token_gain = tl.load(grad_gain + position * K + dim, mask=dim < K, other=0.0).to(tl.float32)
        key_gains = tl.load(coefficients + t * TILE)
        direct_gains = tl.load(coefficients + (TILE + t) * TILE)
        variance = tl.load(innovation_var + position)
        gain_dot = tl.sum(grad_token_gain * token_gain, 0)
        direct_grad = (grad_token_gain - gain_dot * key) / variance
        decay = _load_decay(log_decay, position, dim, K)
        if VARIANCE:
            query = tl.load(q + t * q_token + dim, mask=dim < K, other=0.0).to(tl.float32)
            weight = tl.load(grad_var + position).to(tl.float32)
            query_gains = tl.load(coefficients + (2 * TILE + t) * TILE)
            adjoint_gain += (weight * query_gains)[:, None] * query[None, :]
            adjoint_diag += weight * query * query
            if PAIRED:
                adjoint_pairs += weight * query * load_float32(q + t * q_token, dim ^ 1, K, True)
        adjoint_token_gain = tl.sum(tl.where((row == t)[:, None], adjoint_gain, 0.0), 0)
        gain_quad = tl.sum(adjoint_token_gain * token_gain, 0)
        grad_cov_key = direct_grad - 2.0 * adjoint_token_gain + gain_quad * key
        tl.store(grad_cov_keys + base + t * P, grad_cov_key)
        tl.store(grad_obs + position, gain_quad - gain_dot / variance)
        adjoint_diag += grad_cov_key * key
        noise = tl.load(process_noise + position).to(tl.float32)
        if PAIRED:
            half_terms = 0.5 * grad_cov_key * load_float32(k + t * k_token, dim ^ 1, K, True)
            adjoint_pairs += half_terms + swap_pairs(half_terms, P)
            axis = load_float32(noise_axis + position * K, dim, K, True)
            partner_axis = load_float32(noise_axis + position * K, dim ^ 1, K, True)
            adjoint_axis = adjoint_diag * axis + adjoint_pairs * partner_axis
            tl.store(grad_axis + position * K + dim, 2.0 * noise * adjoint_axis, mask=dim < K)
            noise_terms = axis * adjoint_axis
            adjoint_pairs *= decay * decay
        else:
            noise_terms = adjoint_diag
        tl.store(grad_process + position, tl.sum(noise_terms, 0))
        tl.store(diag_flows + base + t * P, noise * noise_terms - 0.5 * grad_token_gain * token_gain)
        adjoint_diag *= decay * decay
        coefficient = 0.5 * direct_gains - tl.sum(adjoint_gain * token_gain[None, :], 1)
        adjoint_gain += coefficient[:, None] * key[None, :] + (0.5 * key_gains)[:, None] * direct_grad[None, :]
        adjoint_gain = tl.where((row < t)[:, None], adjoint_gain * decay[None, :], 0.0)
    tl.debug_barrier()  # other threads load these stores

    entry_decay = tl.full([P], 1.0, tl.float32)
    noise = tl.zeros([P], tl.float32)
    pair_noise = tl.zeros([P], tl.float32)
    decayed_gains = tl.zeros([TILE, P], tl.float32)
    variances = tl.zeros([TILE], tl.float32)
    padding = (row[:, None] >= count) & (dim >= 0)[None, :]
    tl.store(grad_cov_keys + square, decayed_gains, mask=padding)
    if VARIANCE:
        tl.store(weighted_queries + square, decayed_gains, mask=padding)
    for t in range(count):
        position = (token + t) * G + head
        token_gain = tl.load(gain + position * K + dim, mask=dim < K, other=0.0)
        grad_cov_key = tl.load(grad_cov_keys + base + t * P)
        decay = _load_decay(log_decay, position, dim, K)
        entry_decay *= decay
        new_noise, new_pair_noise = load_noise_blocks(process_noise, noise_axis, position, dim, K, PAIRED)
        noise = decay * decay * noise + new_noise
        decayed_gains *= decay[None, :]
        overlap = variances * tl.sum(decayed_gains * grad_cov_key[None, :], 1)
        variance = tl.load(innovation_var + position)
        gain_quad_var = tl.load(grad_obs + position) * variance
        products = gain_quad_var * token_gain + noise * grad_cov_key - tl.sum(decayed_gains * overlap[:, None], 0)
        if PAIRED:
            pair_noise = decay * decay * pair_noise + new_pair_noise
            products += pair_noise * swap_pairs(grad_cov_key, P)
        tl.store(dk + position * K + dim, products, mask=dim < K)
        tl.store(grad_cov_keys + base + t * P, entry_decay * grad_cov_key)
        is_token = row == t
        decayed_gains = tl.where(is_token[:, None], token_gain[None, :], decayed_gains)
        variances = tl.where(is_token, variance, variances)
        if VARIANCE:
            query = tl.load(q + t * q_token + dim, mask=dim < K, other=0.0).to(tl.float32)
            doubled_weight = 2.0 * tl.load(grad_var + position).to(tl.float32)
            overlap = variances * tl.sum(decayed_gains * query[None, :], 1)
            products = noise * query - tl.sum(decayed_gains * overlap[:, None], 0)
            if PAIRED:
                products += pair_noise * load_float32(q + t * q_token, dim ^ 1, K, True)
            tl.store(dq + position * K + dim, doubled_weight * products, mask=dim < K)
            tl.store(weighted_queries + base + t * P, doubled_weight * entry_decay * query)
    tl.store(scaled_gains + square, decayed_gains * tl.sqrt(variances)[:, None])
    accumulated_noise += slot * (1 + PAIRED) * P + dim
    tl.store(accumulated_noise, noise)
    tl.store(accumulated_noise + P, pair_noise, mask=dim < PAIRED * P)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def finish_backward(
    q, k, log_decay, saved_cov, grad_cov_keys, weighted_queries, scaled_gains, accumulated_noise, tile_decays,
    diag_flows, adjoint_cov_diag, dk, dq, grad_decay, tile_table, length, tiles, q_token, q_head, k_token, k_head, G,
    SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr, TERMS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Add the parts of dk and dq from the covariance at the entry of the chunk; compute gradients of log-decays."""
    chunk, head, _unused = locate_program(G, 1)
    chunk = chunk.to(tl.int64)
    token, count = locate_tile(tile_table, chunk, length, tiles, CHUNK, PACKED)
    TILES_PER_CHUNK: tl.constexpr = CHUNK // TILE
    i, j, row = tl.arange(0, P), tl.arange(0, P), tl.arange(0, TILE)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    flat_t, square_t = row[None, :] * P + i[:, None], row[None, :] * P + j[:, None]
    partner_t = row[None, :] * P + (i ^ 1)[:, None]
    state = tl.load(saved_cov + (chunk * G + head) * (P * P) + i[:, None] * P + j[None, :])
    pending_noise = tl.zeros([P], tl.float32)  # process noise not yet on the diagonal
    pending_pair_noise = tl.zeros([P], tl.float32)
    diag_flow = tl.load(adjoint_cov_diag + (chunk * G + head) * (1 + PAIRED) * P + i)
    num_tiles = tl.cdiv(count, TILE).to(tl.int32)
    for tile_index in range(num_tiles):
        slot = (chunk * TILES_PER_CHUNK + tile_index) * G + head
        base = slot * (TILE * P)
        t = tile_index * TILE + row
        valid = (t < count)[None, :] & (i < K)[:, None]
        first_row = (token + tile_index * TILE) * G + head
        dest = row[None, :] * (G * K) + i[:, None]
        logs = tl.load(log_decay + first_row * K + dest, mask=valid, other=0.0).to(tl.float32)
        entry_decay = tl.exp(tl.cumsum(logs, 1))
        diag_change, vectors_t = tl.load(grad_cov_keys + base + square_t), tl.load(grad_cov_keys + base + flat_t)
        grad_key = tl.load(dk + first_row * K + dest, mask=valid, other=0.0)
        grad_key += entry_decay * (split_matmul(state, diag_change, TERMS) + pending_noise[:, None] * vectors_t)
        if PAIRED:
            grad_key += entry_decay * pending_pair_noise[:, None] * tl.load(grad_cov_keys + base + partner_t)
        tl.store(dk + first_row * K + dest, grad_key, mask=valid)
        if VARIANCE:
            query, vectors_t = tl.load(weighted_queries + base + square_t), tl.load(weighted_queries + base + flat_t)
            grad_query = tl.load(dq + first_row * K + dest, mask=valid, other=0.0)
            grad_query += entry_decay * (split_matmul(state, query, TERMS) + pending_noise[:, None] * vectors_t)
            if PAIRED:
                grad_query += entry_decay * pending_pair_noise[:, None] * tl.load(weighted_queries + base + partner_t)
            tl.store(dq + first_row * K + dest, grad_query, mask=valid)
        key = tl.load(k + tile_index * (TILE * k_token) + row[None, :] * k_token + i[:, None], mask=valid, other=0.0)
        diag_change = tl.load(diag_flows + base + flat_t, mask=valid, other=0.0) - 0.5 * grad_key * key.to(tl.float32)
        if VARIANCE:
            query = tl.load(
                q + tile_index * (TILE * q_token) + row[None, :] * q_token + i[:, None], mask=valid, other=0.0
            )
            diag_change -= 0.5 * grad_query * query.to(tl.float32)
        grad = 2.0 * (diag_flow[:, None] + tl.cumsum(diag_change, 1) - diag_change)
        diag_flow += tl.sum(diag_change, 1)
        tl.store(grad_decay + first_row * K + dest, grad, mask=valid)
        if tile_index + 1 < num_tiles:
            gain_rows, gain_t = (
                tl.load(scaled_gains + base + row[:, None] * P + j[None, :]),
                tl.load(scaled_gains + base + flat_t),
            )
            state = decay_covariance(state, tile_decays + slot * P, i, j, 2) - split_matmul(gain_t, gain_rows, TERMS)
            total_decay = tl.load(tile_decays + slot * P + i)
            noise_at = accumulated_noise + slot * (1 + PAIRED) * P + i
            pending_noise = pending_noise * total_decay * total_decay + tl.load(noise_at)
            if PAIRED:
                pending_pair_noise = pending_pair_noise * total_decay * total_decay + tl.load(noise_at + P)
