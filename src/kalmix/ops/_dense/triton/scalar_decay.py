"""Triton kernels of `dense` for scalar decays (one per head) or none: tiles and chunks by matrix products.

The decay between two tokens s <= t is a number D[t, s], so interactions of the tokens of a tile are matrices. With
gains c, innovation variances s and S[t, s] = D[t, s] k_t'c_s below the diagonal, the innovation covariance of a tile is
(I + S) diag(s) (I + S)' = L L'. Gains follow from L^-1.

In the backward pass, B = I - (I + S)^-1 is the product of k_t with the remaining part of the gain of token s. R and O
are the same products of q_t and of w_t = (dc_t - (dc_t'c_t) k_t) / s_t. With W the gains at the exit of the tile, Q the
adjoint of the covariance there and r the read-out variances,

    M = W Q W' + (O'B + B'O) / 2 + R' diag(dr) R

is the adjoint between two gains at the later of their tokens, and m_t = M[t, t]. With sums over the tokens t' after t,
the last also over t itself,

    du_t = w_t - 2 A(exit, t) Q W_t + m_t k_t + sum D[t', t] ((2 M - O)[t', t] k_t' - B[t', t] w_t')
           - 2 sum D[t', t] R[t', t] dr_t' q_t'

A program of one warp processes a tile, `KEY_BLOCK` keys at a time; a program of four warps processes a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._dense.triton.primitives import UNSPECIALIZED_ARGUMENTS, split_matmul, tile_in_chunk
from kalmix.ops._dense.triton.tile_algebra import (
    accumulated_noise,
    cumulative_log_decay,
    diagonal,
    diagonal_mask,
    earlier_mask,
    exp_float32,
    one_minus_inverse,
    shared_noise,
)
from kalmix.ops._shared.triton.decay_products import pairwise_decay
from kalmix.ops._shared.triton.tiles import (
    load_per_token,
    load_rows,
    load_rows_transposed,
    locate_program,
    locate_tile,
    store_rows,
)

# Keys that a program processes at a time, by stage.
KEY_BLOCKS = {"prepare": 128, "gains": 32, "prepare_backward": 64, "token_vjp": 64, "finish_backward": 128}


def options(stage: str, decay_axes: int, padded: int, terms: int) -> dict[str, int]:
    """Return the constants and launch options of a stage."""
    options_ = {"DECAY": decay_axes, "TERMS": terms, "KEY_BLOCK": min(padded, KEY_BLOCKS[stage]), "num_stages": 1}
    options_ |= {"num_warps": 4 if stage == "finish_backward" else 1}
    return options_ | ({"maxnreg": 128} if stage == "gains" else {})  # allows 16 programs per multiprocessor


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def prepare(
    q, k, obs_noise, process_noise, log_decay, keys, queries, noise_keys, innovation_cov, tile_decays, tile_table,
    length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, TERMS: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute decays, noises and the innovation covariance of a tile that do not depend on the incoming covariance."""
    index, head, _unused = locate_program(G, 1)
    token, count = tile_in_chunk(tile_table, index, length, tiles, TILE, CHUNK, PACKED)
    if count <= 0:
        return
    t, slot, row = tl.arange(0, TILE), index.to(tl.int64) * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    log_entry_decay, log_tile_decay = cumulative_log_decay(log_decay, token, count, head, G, TILE, DECAY)
    decays, entry_decay = pairwise_decay(log_entry_decay, TILE), exp_float32(log_entry_decay)
    noise = accumulated_noise(decays, load_per_token(process_noise + row, count, G, TILE))
    exit_noise = noise * exp_float32(log_tile_decay - log_entry_decay)
    C = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, P, KEY_BLOCK):
        dim = start + tl.arange(0, KEY_BLOCK)
        flat = slot * (TILE * P) + t[:, None] * P + dim[None, :]
        key = load_rows(k, k_token, count, dim, K, TILE)
        C += split_matmul(key, load_rows_transposed(k, k_token, count, dim, K, TILE), TERMS)
        key = key.to(tl.float32)
        tl.store(keys + flat, entry_decay[:, None] * key)
        tl.store(noise_keys + flat, exit_noise[:, None] * key)
        if VARIANCE:
            query = load_rows(q, q_token, count, dim, K, TILE).to(tl.float32)
            tl.store(queries + flat, entry_decay[:, None] * query)
        tile_decay = tile_decays + slot * 2 * P + dim
        tl.store(tile_decay, tl.zeros([KEY_BLOCK], tl.float32) + exp_float32(log_tile_decay))
        tl.store(tile_decay + P, tl.zeros([KEY_BLOCK], tl.float32) + tl.sum(tl.where(t == TILE - 1, noise, 0.0), 0))
    obs = tl.load(obs_noise + row + t * G, mask=t < count, other=1.0).to(tl.float32)
    C = shared_noise(log_entry_decay, decays, noise, TILE) * C + tl.where(diagonal_mask(TILE), obs[:, None], 0.0)
    tl.store(innovation_cov + slot * (TILE * TILE) + t[:, None] * TILE + t[None, :], C)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def gains(
    q, k, obs_noise, process_noise, log_decay, innovation_cov, cov_keys, cov_queries, gain, rounded_gain,
    innovation_var, read_var, tile_table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, TERMS: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gains, innovation variances and read-out variances of a tile."""
    index, head, _unused = locate_program(G, 1)
    token, count = tile_in_chunk(tile_table, index, length, tiles, TILE, CHUNK, PACKED)
    if count <= 0:
        return
    t, slot, row = tl.arange(0, TILE), index.to(tl.int64) * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    log_entry_decay, _ = cumulative_log_decay(log_decay, token, count, head, G, TILE, DECAY)
    decays, entry_decay = pairwise_decay(log_entry_decay, TILE), exp_float32(log_entry_decay)
    noise = accumulated_noise(decays, load_per_token(process_noise + row, count, G, TILE))
    inverse = tl.load(innovation_cov + slot * (TILE * TILE) + t[:, None] * TILE + t[None, :])
    inverse_cholesky = diagonal(inverse, TILE)
    inverse = tl.where(earlier_mask(TILE), inverse / inverse_cholesky[:, None], 0.0)
    obs = tl.load(obs_noise + row + t * G, mask=t < count, other=1.0).to(tl.float32)
    innovation_variance = tl.maximum(1.0 / (inverse_cholesky * inverse_cholesky), obs)
    tl.store(innovation_var + row + t * G, innovation_variance, mask=t < count)
    noise_coefficients = inverse * decays * noise[None, :]
    overlap = tl.zeros([TILE, TILE], tl.float32)
    variance = tl.zeros([TILE], tl.float32)
    for start in range(0, P, KEY_BLOCK):
        dim = start + tl.arange(0, KEY_BLOCK)
        flat = slot * (TILE * P) + t[:, None] * P + dim[None, :]
        key, cov_key = load_rows(k, k_token, count, dim, K, TILE), tl.load(cov_keys + flat)
        gain_rows = entry_decay[:, None] * (cov_key + split_matmul(inverse, cov_key, TERMS))
        gain_rows = (
            gain_rows + noise[:, None] * key.to(tl.float32) + split_matmul(noise_coefficients, key, TERMS)
        ) / innovation_variance[:, None]
        store_rows(gain + row * K, G * K, count, dim, gain_rows, K, TILE)
        if gain.dtype != rounded_gain.dtype:
            store_rows(rounded_gain + row * K, G * K, count, dim, gain_rows, K, TILE)
        if VARIANCE:
            query = load_rows(q, q_token, count, dim, K, TILE)
            overlap += split_matmul(query, tl.trans(gain_rows), TERMS)
            query = query.to(tl.float32)
            variance += tl.sum(query * (entry_decay[:, None] * tl.load(cov_queries + flat) + noise[:, None] * query), 1)
    if VARIANCE:
        overlap *= decays
        variance -= tl.sum(overlap * overlap * tl.where(t < count, innovation_variance, 0.0)[None, :], 1)
        tl.store(read_var + row + t * G, tl.maximum(variance, 0.0), mask=t < count)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def prepare_backward(
    q, k, log_decay, gain, innovation_var, grad_gain, keys, exit_gains, tile_terms, queries, coefficients, tile_decays,
    tile_table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, TERMS: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute W, Y and the matrices B, O and R of a tile."""
    index, head, _unused = locate_program(G, 1)
    token, count = tile_in_chunk(tile_table, index, length, tiles, TILE, CHUNK, PACKED)
    if count <= 0:
        return
    t, slot, row = tl.arange(0, TILE), index.to(tl.int64) * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    gain += row * K
    grad_gain += row * K
    key_gains = tl.zeros([TILE, TILE], tl.float32)
    direct_gains = tl.zeros([TILE, TILE], tl.float32)
    query_gains = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, P, KEY_BLOCK):
        dim = start + tl.arange(0, KEY_BLOCK)
        gain_cols = load_rows_transposed(gain, G * K, count, dim, K, TILE)
        key_gains += split_matmul(load_rows(k, k_token, count, dim, K, TILE), gain_cols, TERMS)
        direct_gains += split_matmul(load_rows(grad_gain, G * K, count, dim, K, TILE), gain_cols, TERMS)
        if VARIANCE:
            query_gains += split_matmul(load_rows(q, q_token, count, dim, K, TILE), gain_cols, TERMS)
    log_entry_decay, log_tile_decay = cumulative_log_decay(log_decay, token, count, head, G, TILE, DECAY)
    decays, entry_decay, exit_decay = (
        pairwise_decay(log_entry_decay, TILE),
        exp_float32(log_entry_decay),
        exp_float32(log_tile_decay - log_entry_decay),
    )
    inverse = 1.0 / tl.load(innovation_var + row + t * G, mask=t < count, other=1.0)
    gain_dot = diagonal(direct_gains, TILE)
    key_gains *= decays
    direct_gains = tl.where(
        earlier_mask(TILE), (decays * direct_gains - gain_dot[:, None] * key_gains) * inverse[:, None], 0.0
    )
    key_gains = one_minus_inverse(key_gains, TILE, TERMS)
    direct_gains -= split_matmul(direct_gains, key_gains, TERMS)
    square = coefficients + slot * (3 * TILE * TILE) + t[:, None] * TILE + t[None, :]
    tl.store(square, key_gains)
    tl.store(square + TILE * TILE, direct_gains)
    if VARIANCE:
        query_gains *= decays
        query_gains -= split_matmul(query_gains, key_gains, TERMS)
        tl.store(square + 2 * TILE * TILE, query_gains)
    key_gains_t, entry_coefficients = tl.trans(key_gains), direct_gains * entry_decay[None, :]
    for start in range(0, P, KEY_BLOCK):
        dim = start + tl.arange(0, KEY_BLOCK)
        flat = slot * (TILE * P) + t[:, None] * P + dim[None, :]
        gain_cols = exit_decay[:, None] * load_rows(gain, G * K, count, dim, K, TILE)
        tl.store(exit_gains + flat, gain_cols - split_matmul(key_gains_t, gain_cols, TERMS))
        key = load_rows(k, k_token, count, dim, K, TILE)
        half_term = split_matmul(entry_coefficients, key, TERMS)
        if VARIANCE:
            query = load_rows(q, q_token, count, dim, K, TILE).to(tl.float32)
            query = entry_decay[:, None] * query - split_matmul(query_gains * entry_decay[None, :], key, TERMS)
            tl.store(queries + flat, query)
        key = key.to(tl.float32)
        tl.store(keys + flat, entry_decay[:, None] * key)
        direct_grad = load_rows(grad_gain, G * K, count, dim, K, TILE) - gain_dot[:, None] * key
        half_term = 0.5 * ((entry_decay * inverse)[:, None] * direct_grad - half_term)
        tl.store(tile_terms + flat, half_term - split_matmul(key_gains_t, half_term, TERMS))
        tl.store(tile_decays + slot * P + dim, tl.zeros([KEY_BLOCK], tl.float32) + exp_float32(log_tile_decay))


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def token_vjp(
    q, k, process_noise, log_decay, gain, innovation_var, grad_gain, grad_var, coefficients, adjoint_gains,
    adjoint_diags, grad_obs, grad_process, grad_decay, grad_cov_keys, tile_table, length, tiles, q_token, q_head,
    k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, TERMS: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute du of a tile's tokens, and gradients of the noises.

    Gradients of log-decays receive the part that does not depend on the covariance.
    """
    index, head, _unused = locate_program(G, 1)
    token, count = tile_in_chunk(tile_table, index, length, tiles, TILE, CHUNK, PACKED)
    if count <= 0:
        return
    t, slot, row = tl.arange(0, TILE), index.to(tl.int64) * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    gain += row * K
    grad_gain += row * K
    gain_gram = tl.zeros([TILE, TILE], tl.float32)
    gain_dot = tl.zeros([TILE], tl.float32)
    for start in range(0, P, KEY_BLOCK):
        dim = start + tl.arange(0, KEY_BLOCK)
        gain_rows = load_rows(gain, G * K, count, dim, K, TILE)
        gain_dot += tl.sum(gain_rows * load_rows(grad_gain, G * K, count, dim, K, TILE), 1)
        adjoint_gain = tl.load(adjoint_gains + slot * (TILE * P) + t[None, :] * P + dim[:, None])
        gain_gram += split_matmul(gain_rows, adjoint_gain, TERMS)
    log_entry_decay, log_tile_decay = cumulative_log_decay(log_decay, token, count, head, G, TILE, DECAY)
    decays, exit_decay = pairwise_decay(log_entry_decay, TILE), exp_float32(log_tile_decay - log_entry_decay)
    square = coefficients + slot * (3 * TILE * TILE) + t[:, None] * TILE + t[None, :]
    key_gains, direct_gains = tl.load(square), tl.load(square + TILE * TILE)
    cross, gain_gram = split_matmul(tl.trans(direct_gains), key_gains, TERMS), exit_decay[:, None] * gain_gram
    gain_gram += 0.5 * (cross + tl.trans(cross)) - split_matmul(tl.trans(key_gains), gain_gram, TERMS)
    query_coefficients = tl.zeros([TILE, TILE], tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    if VARIANCE:
        weight = load_per_token(grad_var + row, count, G, TILE)
        query_gains = tl.load(square + 2 * TILE * TILE)
        query_coefficients = weight[:, None] * query_gains
        gain_gram += split_matmul(tl.trans(query_gains), query_coefficients, TERMS)
        query_coefficients = tl.trans(2.0 * decays * query_coefficients)
    gain_quad = diagonal(gain_gram, TILE)
    inverse = 1.0 / tl.load(innovation_var + row + t * G, mask=t < count, other=1.0)
    tl.store(grad_obs + row + t * G, gain_quad - gain_dot * inverse, mask=t < count)
    key_coefficients = tl.trans(tl.where(earlier_mask(TILE), decays * (2.0 * gain_gram - direct_gains), 0.0))
    direct_coefficients = tl.trans(decays * key_gains)
    grad_trace = tl.zeros([TILE], tl.float32)  # trace of the adjoint at each token
    trace = tl.zeros([1], tl.float32)
    for start in range(0, P, KEY_BLOCK):
        dim = start + tl.arange(0, KEY_BLOCK)
        flat = slot * (TILE * P) + t[:, None] * P + dim[None, :]
        key = load_rows(k, k_token, count, dim, K, TILE)
        grad_cov_key = split_matmul(key_coefficients, key, TERMS)
        key = key.to(tl.float32)
        direct_grad = (load_rows(grad_gain, G * K, count, dim, K, TILE) - gain_dot[:, None] * key) * inverse[:, None]
        grad_cov_key -= split_matmul(direct_coefficients, direct_grad, TERMS)
        grad_cov_key += (
            direct_grad + gain_quad[:, None] * key - (2.0 * exit_decay)[:, None] * tl.load(adjoint_gains + flat)
        )
        if VARIANCE:
            query = load_rows(q, q_token, count, dim, K, TILE)
            grad_cov_key -= split_matmul(query_coefficients, query, TERMS)
            query = query.to(tl.float32)
            grad_trace += weight * tl.sum(query * query, 1)
        tl.store(grad_cov_keys + flat, grad_cov_key)
        grad_trace += tl.sum(grad_cov_key * key, 1)
        trace += tl.sum(tl.load(adjoint_diags + slot * P + dim), 0)
    grad_trace = tl.sum(decays * decays * grad_trace[:, None], 0) + exit_decay * exit_decay * trace
    tl.store(grad_process + row + t * G, grad_trace, mask=t < count)
    if DECAY:
        grad_trace *= load_per_token(process_noise + row, count, G, TILE)
        tl.store(grad_decay + row + t * G, grad_trace - 0.5 * gain_dot, mask=t < count)


@triton.jit
def _apply_covariance(
    vectors_at, count, state, gains, G, K: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, TERMS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return vectors of a chunk's tokens times a covariance, and times gains, `[t, s]`."""
    t, j = tl.arange(0, SIZE), tl.arange(0, P)
    products = tl.zeros([SIZE, P], tl.float32)
    gain_products = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, P, KEY_BLOCK):
        dim = start + tl.arange(0, KEY_BLOCK)
        vectors = tl.load(vectors_at[:, None] + dim[None, :], mask=(t < count)[:, None] & (dim < K)[None, :], other=0.0)
        gain_products += split_matmul(vectors, load_rows_transposed(gains, G * K, count, dim, K, SIZE), TERMS)
        products += split_matmul(vectors, tl.load(state + dim[:, None] * P + j[None, :]), TERMS)
    return products, gain_products


@triton.jit
def add_rows(base, stride, count, column, x, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Add rows to those in memory."""
    previous = load_rows(base, stride, count, column, WIDTH, SIZE).to(tl.float32)
    store_rows(base, stride, count, column, previous + x, WIDTH, SIZE)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def finish_backward(
    q, k, process_noise, log_decay, gain, innovation_var, grad_var, saved_cov, grad_cov_keys, adjoint_cov_diag,
    grad_obs, dk, dq, grad_decay, tile_table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, TERMS: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Add Pb du to dk and Pb q to dq of a chunk's tokens, with Pb from the covariance at the entry of the chunk."""
    chunk, head, _unused = locate_program(G, 1)
    chunk = chunk.to(tl.int64)
    token, count = locate_tile(tile_table, chunk, length, tiles, CHUNK, PACKED)
    if count <= 0:
        return
    t, dim, chunk_offset, row = tl.arange(0, CHUNK), tl.arange(0, P), chunk * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    slot = (chunk * (CHUNK // TILE) + t // TILE) * G + head
    grad_cov_keys += slot * (TILE * P) + t % TILE * P
    saved_cov += chunk_offset * (P * P)
    gain += row * K
    cov_products, gain_products = _apply_covariance(
        grad_cov_keys, count, saved_cov, gain, G, K, P, CHUNK, TERMS, KEY_BLOCK
    )
    log_entry_decay, _ = cumulative_log_decay(log_decay, token, count, head, G, CHUNK, DECAY)
    decays, entry_decay = pairwise_decay(log_entry_decay, CHUNK), exp_float32(log_entry_decay)
    noise = accumulated_noise(decays, load_per_token(process_noise + row, count, G, CHUNK))
    innovation_variance = load_per_token(innovation_var + row, count, G, CHUNK)
    explained = decays * decays * innovation_variance[None, :]
    gain_quad_var = innovation_variance * load_per_token(grad_obs + row, count, G, CHUNK)
    gain_products = tl.where(diagonal_mask(CHUNK), gain_quad_var[:, None], -explained * gain_products)
    cov_products = (entry_decay * entry_decay)[:, None] * cov_products + split_matmul(
        gain_products, load_rows(gain, G * K, count, dim, K, CHUNK), TERMS
    )
    cov_products += noise[:, None] * tl.load(
        grad_cov_keys[:, None] + dim[None, :], mask=(t < count)[:, None], other=0.0
    )
    add_rows(dk + row * K, G * K, count, dim, cov_products, K, CHUNK)
    diag_terms = tl.sum(cov_products * load_rows(k, k_token, count, dim, K, CHUNK).to(tl.float32), 1)
    if VARIANCE:
        cov_products, gain_products = _apply_covariance(
            q + t * q_token, count, saved_cov, gain, G, K, P, CHUNK, TERMS, KEY_BLOCK
        )
        query = load_rows(q, q_token, count, dim, K, CHUNK).to(tl.float32)
        gain_products = split_matmul(-explained * gain_products, load_rows(gain, G * K, count, dim, K, CHUNK), TERMS)
        cov_products = (entry_decay * entry_decay)[:, None] * cov_products + noise[:, None] * query + gain_products
        cov_products *= 2.0 * load_per_token(grad_var + row, count, G, CHUNK)[:, None]
        add_rows(dq + row * K, G * K, count, dim, cov_products, K, CHUNK)
        diag_terms += tl.sum(cov_products * query, 1)
    if DECAY:
        grad_change = load_per_token(grad_decay + row, count, G, CHUNK) - 0.5 * diag_terms
        grad = 2.0 * (
            tl.sum(tl.load(adjoint_cov_diag + chunk_offset * P + dim), 0) + tl.cumsum(grad_change, 0) - grad_change
        )
        tl.store(grad_decay + row + t * G, grad, mask=t < count)
