"""`ridge` in Triton, backward: the adjoints of H and U from tile to tile, from the end; see `triton_backward`.

Some columns a program, noted as they are after every tile: `retreat` those of H, `retrace` those of U.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._ridge.triton.solve import load_block, load_numbers, load_state, store_block
from kalmix.ops._shared.triton.tiles import LOOSE, load_columns, load_per_token, load_rows, product, run_of


@triton.jit(do_not_specialize=LOOSE)
def retreat(
    k, grams, solution, adjoint, entering, across, written, carried, adjoints, to_last, to_prior, runs, length, tiles,
    k_token, k_head, last_n, last_g, last_i, last_j, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, ADAPTIVE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of Lambda of one sequence and head, from its end, noted as it is after every tile."""
    KIND: tl.constexpr = adjoints.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, column = tl.arange(0, P), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    tile, token, tokens = run_of(runs, sequence, length, tiles, PACKED)
    last = tl.cdiv(tokens, SIZE) - 1
    k += head // SHARE * k_head
    state = load_state(to_last + sequence * last_n + head * last_g, lane, column, last_i, last_j, K, K)
    for step in tl.range(0, last + 1, num_stages=STAGES):
        i = last - step
        count = tl.minimum(tokens - i * SIZE, SIZE)
        at, slot = token + i * SIZE, (tile + i) * G + head
        store_block(adjoints + slot * K * K, lane, column, state, K, K)
        half = tl.full([SIZE, 1], -0.5, tl.float32)
        if DECAYS:
            state *= tl.load(across + slot)
            half *= load_numbers(entering, slot, SIZE)[:, None]
        y, x = adjoint + (at * G + head) * K, solution + (at * G + head) * K
        right = (load_rows(x, G * K, count, column, K, SIZE).to(tl.float32) * half).to(KIND)
        state = product(load_columns(y, G * K, count, lane, K, SIZE), right, PRECISION, state)
        right = (load_rows(y, G * K, count, column, K, SIZE).to(tl.float32) * half).to(KIND)
        state = product(load_columns(x, G * K, count, lane, K, SIZE), right, PRECISION, state)
        if ADAPTIVE:
            weight = load_numbers(written, slot, SIZE)[:, None]
            right = (load_rows(k + at * k_token, k_token, count, column, K, SIZE).to(tl.float32) * weight).to(KIND)
            state = product(load_columns(k + at * k_token, k_token, count, lane, K, SIZE), right, PRECISION, state)
            entry = load_block(grams + slot * K * K, lane, column, K, K)
            state += tl.load(carried + slot) * entry.to(tl.float32)
    store_block(to_prior + (sequence * G + head) * K * K, lane, column, state, K, K)


@triton.jit(do_not_specialize=LOOSE)
def retrace(
    q, mix, solution, to_mean, entering, across, adjoints, to_last, to_prior, runs, length, tiles,
    q_token, q_head, m_token, m_head, last_n, last_g, last_i, last_j, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, MIXES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same of Mu."""
    KIND: tl.constexpr = adjoints.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, column = tl.arange(0, P), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    tile, token, tokens = run_of(runs, sequence, length, tiles, PACKED)
    last = tl.cdiv(tokens, SIZE) - 1
    q += head // SHARE * q_head
    to_mean += head * m_head
    state = load_state(to_last + sequence * last_n + head * last_g, lane, column, last_i, last_j, K, V)
    for step in tl.range(0, last + 1, num_stages=STAGES):
        i = last - step
        count = tl.minimum(tokens - i * SIZE, SIZE)
        at, slot = token + i * SIZE, (tile + i) * G + head
        store_block(adjoints + slot * K * V, lane, column, state, K, V)
        right = load_rows(to_mean + at * m_token, m_token, count, column, V, SIZE)
        if DECAYS:
            state *= tl.load(across + slot)
            right = (right.to(tl.float32) * load_numbers(entering, slot, SIZE)[:, None]).to(KIND)
        reader = load_columns(solution + (at * G + head) * K, G * K, count, lane, K, SIZE)
        if MIXES:
            share = load_per_token(mix + at * G + head, count, G, SIZE)[None, :]
            query = load_columns(q + at * q_token, q_token, count, lane, K, SIZE).to(tl.float32)
            reader = (query + share * (reader.to(tl.float32) - query)).to(KIND)
        state = product(reader, right, PRECISION, state)
    store_block(to_prior + (sequence * G + head) * K * V, lane, column, state, K, V)
