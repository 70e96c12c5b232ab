"""Triton kernels that step the adjoints of H and U from the last tile to the first; see `backward`.

A program handles a block of columns and stores the adjoint after every tile. Unless FINAL, the adjoint after the last
tile is 0, and neither read nor stored. If NO_PRIOR, the prior is 0: H before the first tile is not read, and the
gradient of the prior is not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._ridge.triton.solve import load_block, load_state, load_token_scalars, store_block
from kalmix.ops._shared.triton.tiles import (
    UNSPECIALIZED,
    boundary_index,
    load_per_token,
    load_rows,
    load_rows_transposed,
    locate_sequence,
    matmul,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gram_backward(
    k, grams, solution, adjoint, entry_decays, tile_decays, tile_weights, entry_weights, adjoints, grad_final,
    grad_prior, sequence_table, length, tiles, k_token, k_head, last_n, last_g, last_i, last_j, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, ADAPTIVE: tl.constexpr, NO_PRIOR: tl.constexpr, FINAL: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Step a block of columns of Lambda, the adjoint of H, through the tiles of one sequence and head."""
    DTYPE: tl.constexpr = adjoints.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim, column = tl.arange(0, P), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first_tile, token, tokens = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    last_tile = tl.cdiv(tokens, SIZE) - 1
    if NO_PRIOR and not FINAL:  # noqa: SIM102 - a compile-time condition needs its own `if`
        if last_tile <= 0:
            return
    k += head // SHARE * k_head
    if FINAL:
        state = load_state(grad_final + sequence * last_n + head * last_g, dim, column, last_i, last_j, K, K)
    else:
        state = tl.zeros([P, COLUMNS], tl.float32)
    for step in tl.range(0, last_tile + 1, num_stages=STAGES):
        i = last_tile - step
        count = tl.minimum(tokens - i * SIZE, SIZE)
        token_start, slot = token + i * SIZE, (first_tile + i) * G + head
        if FINAL:
            store_block(adjoints + slot * K * K, dim, column, state, K, K)
        else:
            exit_slot = boundary_index(token_start + SIZE, SIZE) * G + head
            store_block(adjoints + exit_slot * K * K, dim, column, state, K, K, step > 0)
        half_decay = tl.full([SIZE, 1], -0.5, tl.float32)
        if DECAY:
            state *= tl.load(tile_decays + slot)
            half_decay *= load_token_scalars(entry_decays, slot, SIZE)[:, None]
        y, x = adjoint + (token_start * G + head) * K, solution + (token_start * G + head) * K
        right = (load_rows(x, G * K, count, column, K, SIZE).to(tl.float32) * half_decay).to(DTYPE)
        state = matmul(load_rows_transposed(y, G * K, count, dim, K, SIZE), right, PRECISION, state)
        right = (load_rows(y, G * K, count, column, K, SIZE).to(tl.float32) * half_decay).to(DTYPE)
        state = matmul(load_rows_transposed(x, G * K, count, dim, K, SIZE), right, PRECISION, state)
        if ADAPTIVE:
            weight = load_token_scalars(tile_weights, slot, SIZE)[:, None]
            right = (load_rows(k + token_start * k_token, k_token, count, column, K, SIZE).to(tl.float32) * weight).to(
                DTYPE
            )
            state = matmul(
                load_rows_transposed(k + token_start * k_token, k_token, count, dim, K, SIZE), right, PRECISION, state
            )
            if NO_PRIOR:
                entry = boundary_index(token_start, SIZE) * G + head
                entry_gram = load_block(grams + entry * K * K, dim, column, K, K, i > 0)
            else:
                entry_gram = load_block(grams + slot * K * K, dim, column, K, K)
            state += tl.load(entry_weights + slot) * entry_gram.to(tl.float32)
    if not NO_PRIOR:
        store_block(grad_prior + (sequence * G + head) * K * K, dim, column, state, K, K)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def cross_backward(
    q, mix, solution, grad_mean, entry_decays, tile_decays, adjoints, grad_final, grad_prior, sequence_table, length,
    tiles, q_token, q_head, m_token, m_head, last_n, last_g, last_i, last_j, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, MIX: tl.constexpr, NO_PRIOR: tl.constexpr, FINAL: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Step a block of columns of Mu, the adjoint of U, through the tiles of one sequence and head."""
    DTYPE: tl.constexpr = adjoints.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim, column = tl.arange(0, P), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first_tile, token, tokens = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    last_tile = tl.cdiv(tokens, SIZE) - 1
    if NO_PRIOR and not FINAL:  # noqa: SIM102 - a compile-time condition needs its own `if`
        if last_tile <= 0:
            return
    q += head // SHARE * q_head
    grad_mean += head * m_head
    if FINAL:
        state = load_state(grad_final + sequence * last_n + head * last_g, dim, column, last_i, last_j, K, V)
    else:
        state = tl.zeros([P, COLUMNS], tl.float32)
    for step in tl.range(0, last_tile + 1, num_stages=STAGES):
        i = last_tile - step
        count = tl.minimum(tokens - i * SIZE, SIZE)
        token_start, slot = token + i * SIZE, (first_tile + i) * G + head
        if FINAL:
            store_block(adjoints + slot * K * V, dim, column, state, K, V)
        else:
            exit_slot = boundary_index(token_start + SIZE, SIZE) * G + head
            store_block(adjoints + exit_slot * K * V, dim, column, state, K, V, step > 0)
        right = load_rows(grad_mean + token_start * m_token, m_token, count, column, V, SIZE)
        if DECAY:
            state *= tl.load(tile_decays + slot)
            right = (right.to(tl.float32) * load_token_scalars(entry_decays, slot, SIZE)[:, None]).to(DTYPE)
        reader = load_rows_transposed(solution + (token_start * G + head) * K, G * K, count, dim, K, SIZE)
        if MIX:
            share = load_per_token(mix + token_start * G + head, count, G, SIZE)[None, :]
            query = load_rows_transposed(q + token_start * q_token, q_token, count, dim, K, SIZE).to(tl.float32)
            reader = (query + share * (reader.to(tl.float32) - query)).to(DTYPE)
        state = matmul(reader, right, PRECISION, state)
    if not NO_PRIOR:
        store_block(grad_prior + (sequence * G + head) * K * V, dim, column, state, K, V)
