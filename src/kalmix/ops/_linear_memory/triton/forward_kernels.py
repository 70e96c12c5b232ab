"""Forward kernels of linear memories in Triton, for `additive` and `delta`.

In a tile of tokens, let M be the memory at the start, A(t, s) the decay from token s to token t, and w the write
vectors. With e the values or, for `delta`, the prediction errors,

    mean_t = q~_t' M + sum_{s <= t} S[t, s] e_s,     S[t, s] = q_t' A(t, s) w_s,     q~_t = A(t, start) q_t
    M'     = A(end, start) M + sum_s w^_s e_s',      w^_s = A(end, s) w_s

The errors are E = (I + N)^-1 (V - K~ M), where N[t, s] = k_t' A(t, s) w_s for t > s and k~_t = A(t, start) k_t. So
E = U - W M with U = (I + N)^-1 V and W = (I + N)^-1 K~. There are three passes:

1. `solve_errors` (`delta` only): U and W of all tiles in parallel;
2. `scan_memory`: the memory from tile to tile; stores it at the start of every tile, and the errors;
3. `read_out`: the means of all tiles in parallel.

A decay per head scales whole rows, so the kernels apply it to the products. Decays per key are folded into q~, k~, w^,
S and N beforehand (`vector_decay`); the kernels then see no decay inside tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._linear_memory import scratch
from kalmix.ops._shared.triton.decay_products import log_decay_from_start, pairwise_decay, pairwise_decay_transposed
from kalmix.ops._shared.triton.tiles import (
    FIRST_TILE,
    LAST_TILE,
    UNSPECIALIZED,
    boundary_index,
    has_neighbour,
    load_per_token,
    load_rows,
    load_rows_transposed,
    load_state,
    locate_program,
    locate_sequence,
    locate_tile,
    matmul,
    num_levels,
    store_rows,
    store_state,
)

SUBTILE = tl.constexpr(scratch.SUBTILE)


@triton.jit
def unit_lower_inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Compute (I + lower)^-1 for strictly lower triangular `[SIZE, SIZE]` float32.

    With X the inverses of the diagonal blocks of h rows and B the blocks of `lower` between neighbours, the inverses of
    the diagonal blocks of 2 h rows are X - X B X.
    """
    t = tl.arange(0, SIZE)
    xor = t[:, None] ^ t[None, :]
    inverse = tl.where(xor == 0, 1.0, 0.0) - tl.where(xor == 1, lower, 0.0)
    return join_inverses(inverse, lower, 2, SIZE, PRECISION)


@triton.jit
def join_inverses(inverse, lower, BLOCK: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Compute `unit_lower_inverse`, given the inverses of the diagonal blocks of BLOCK rows, with zeros elsewhere."""
    t = tl.arange(0, SIZE)
    xor = t[:, None] ^ t[None, :]
    for level in range(num_levels(BLOCK), num_levels(SIZE)):
        neighbours = tl.where(xor >> level == 1, lower, 0.0)
        inverse -= matmul(matmul(inverse, neighbours, PRECISION), inverse, PRECISION)
    return inverse


@triton.jit(do_not_specialize=UNSPECIALIZED)
def solve_errors(
    k, writes, v, gain, log_decay, from_start, corrections, inverses, error_keys, initial_errors, tile_table,
    length, tiles, k_token, k_head, w_token, w_head, v_token, v_head, G, K_GROUP, W_GROUP,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, GAINS: tl.constexpr, PRECOMPUTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store (I + N)^-1 of a tile, W (`error_keys`) and U (`initial_errors`).

    If PRECOMPUTED, `corrections` has N for pairs of tokens in different subtiles, and (I + N)^-1 of each subtile.
    """
    index, head, _block = locate_program(G, 1)
    token, count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    DTYPE: tl.constexpr = error_keys.dtype.element_ty
    t = tl.arange(0, SIZE)
    row = token * G + head
    k += token * k_token + head // K_GROUP * k_head
    if PRECOMPUTED:
        lower = load_rows(corrections + row * SIZE, G * SIZE, count, t, SIZE, SIZE).to(tl.float32)
        diagonal = tl.where((t[:, None] ^ t[None, :]) < SUBTILE, lower, 0.0)
        inverse = join_inverses(diagonal, lower, SUBTILE, SIZE, PRECISION).to(DTYPE)
    else:
        writes += token * w_token + head // W_GROUP * w_head
        lower = tl.zeros([SIZE, SIZE], tl.float32)
        for start in range(0, K, BLOCK):
            column = start + tl.arange(0, BLOCK)
            key = load_rows(k, k_token, count, column, K, SIZE)
            write = load_rows_transposed(writes, w_token, count, column, K, SIZE).to(DTYPE)
            lower = matmul(key, write, PRECISION, lower)
        if DECAYS:
            cumulative, _total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
            lower *= pairwise_decay(cumulative, SIZE)
        if GAINS:
            lower *= load_per_token(gain + row, count, G, SIZE)[None, :]
        lower = tl.where(t[:, None] > t[None, :], lower, 0.0)
        inverse = unit_lower_inverse(lower, SIZE, PRECISION).to(DTYPE)
    store_rows(inverses + row * SIZE, G * SIZE, count, t, inverse, SIZE, SIZE)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = load_rows(v + token * v_token + head * v_head, v_token, count, column, V, SIZE)
        store_rows(initial_errors + row * V, G * V, count, column, matmul(inverse, value, PRECISION), V, SIZE)
    if DECAYS:
        scale = load_per_token(from_start + row, count, G, SIZE)
        inverse = (inverse * scale[None, :]).to(DTYPE)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        key = load_rows(k, k_token, count, column, K, SIZE)
        store_rows(error_keys + row * K, G * K, count, column, matmul(inverse, key, PRECISION), K, SIZE)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan_memory(
    writes, error_keys, initial_errors, errors, states, prior, final, to_end, tile_decay, sequence_table, length, tiles,
    w_token, w_head, v_token, v_head, prior_n, prior_g, prior_k, prior_v, G, W_GROUP,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, PER_KEY: tl.constexpr, SCALED: tl.constexpr, CORRECTS: tl.constexpr,
    STORE: tl.constexpr, NO_PRIOR: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scan the memory of one sequence and head over tiles, for some columns; store states and errors if STORE.

    If NO_PRIOR, the prior is 0 and not read. States are then stored at the boundaries between tiles only.
    `initial_errors` may be `errors`.
    """
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = initial_errors.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    tile, token, tokens = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    prior += sequence * prior_n + head * prior_g
    memory = ()
    for j in tl.static_range(BLOCKS):
        key = j * BLOCK + tl.arange(0, BLOCK)
        inside = (key < K)[:, None] & (column < V)[None, :]
        if NO_PRIOR:
            memory += (tl.zeros([BLOCK, VALUES], tl.float32),)
        else:
            memory += (tl.load(prior + key[:, None] * prior_k + column[None, :] * prior_v, mask=inside, other=0.0),)
    writes += head // W_GROUP * w_head
    initial_errors += head * v_head
    for i in tl.range(0, tl.cdiv(tokens, SIZE), num_stages=STAGES):
        count = tl.minimum(tokens - i * SIZE, SIZE)
        at, state = token + i * SIZE, (tile + i) * G + head
        row = at * G + head
        if STORE:
            stored_at, is_stored = state, None
            if NO_PRIOR:
                stored_at, is_stored = boundary_index(at, SIZE) * G + head, i > 0
            for j in tl.static_range(BLOCKS):
                key = j * BLOCK + tl.arange(0, BLOCK)
                store_state(states + stored_at * K * V, key, column, memory[j], K, V, is_stored)
        error = load_rows(initial_errors + at * v_token, v_token, count, column, V, SIZE)
        if CORRECTS:
            predicted = tl.zeros([SIZE, VALUES], tl.float32)
            for j in tl.static_range(BLOCKS):
                key = j * BLOCK + tl.arange(0, BLOCK)
                left = load_rows(error_keys + row * K, G * K, count, key, K, SIZE)
                predicted = matmul(left, memory[j].to(DTYPE), PRECISION, predicted)
            error = error.to(tl.float32) - predicted
            if STORE:
                store_rows(errors + row * V, G * V, count, column, error, V, SIZE)
        if SCALED:
            error = error.to(tl.float32) * load_per_token(to_end + row, count, G, SIZE)[:, None]
        error = error.to(DTYPE)
        decay = 1.0
        if DECAYS:
            decay = tl.load(tile_decay + state)
        updated = ()
        for j in tl.static_range(BLOCKS):
            key = j * BLOCK + tl.arange(0, BLOCK)
            if PER_KEY:
                decay = tl.load(tile_decay + state * K + key, mask=key < K, other=0.0)[:, None]
            write = load_rows_transposed(writes + at * w_token, w_token, count, key, K, SIZE).to(DTYPE)
            updated += (matmul(write, error, PRECISION, memory[j] * decay),)
        memory = updated
    for j in tl.static_range(BLOCKS):
        key = j * BLOCK + tl.arange(0, BLOCK)
        store_state(final + (sequence * G + head) * K * V, key, column, memory[j], K, V)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def read_out(
    q, writes, errors, gain, log_decay, scores, states, mean, tile_table, length, tiles,
    q_token, q_head, w_token, w_head, v_token, v_head, G, Q_GROUP, W_GROUP,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr, PRECOMPUTED: tl.constexpr, BACKWARD: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the means of a tile, for some columns.

    If BACKWARD, store the gradients of the values: read with write vectors instead of queries, from the gradients of
    the memory at the end of the tile and of the means of later tokens. If INNER, `states` are those at the boundaries
    between tiles, and 0 at the edge of a sequence.
    """
    index, head, block = locate_program(G, (V + VALUES - 1) // VALUES)
    column = block * VALUES + tl.arange(0, VALUES)
    token, count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    DTYPE: tl.constexpr = states.dtype.element_ty
    t = tl.arange(0, SIZE)
    row = token * G + head
    q += token * q_token + head // Q_GROUP * q_head
    writes += token * w_token + head // W_GROUP * w_head
    state_at, is_stored = index.to(tl.int64), None
    if INNER:
        if BACKWARD:
            state_at, is_stored = boundary_index(token + SIZE, SIZE), has_neighbour(tile_table, index, LAST_TILE)
        else:
            state_at, is_stored = boundary_index(token, SIZE), has_neighbour(tile_table, index, FIRST_TILE)
    states += (state_at * G + head) * K * V
    output = tl.zeros([SIZE, VALUES], tl.float32)
    score = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, K, BLOCK):
        key = start + tl.arange(0, BLOCK)
        if BACKWARD:
            left = load_rows(writes, w_token, count, key, K, SIZE).to(DTYPE)
        else:
            left = load_rows(q, q_token, count, key, K, SIZE)
        output = matmul(left, load_state(states, key, column, K, V, is_stored), PRECISION, output)
        if not PRECOMPUTED:
            if BACKWARD:
                right = load_rows_transposed(q, q_token, count, key, K, SIZE)
            else:
                right = load_rows_transposed(writes, w_token, count, key, K, SIZE).to(DTYPE)
            score = matmul(left, right, PRECISION, score)
    if PRECOMPUTED:
        if BACKWARD:
            score = load_rows_transposed(scores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
        else:
            score = load_rows(scores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
    else:
        if DECAYS:
            cumulative, total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
            if BACKWARD:
                output *= tl.exp((total - cumulative).to(tl.float32))[:, None]
                score *= pairwise_decay_transposed(cumulative, SIZE)
            else:
                output *= tl.exp(cumulative.to(tl.float32))[:, None]
                score *= pairwise_decay(cumulative, SIZE)
        elif BACKWARD:
            score = tl.where(t[:, None] <= t[None, :], score, 0.0)
        else:
            score = tl.where(t[:, None] >= t[None, :], score, 0.0)
        if GAINS:
            weight = load_per_token(gain + row, count, G, SIZE)
            if BACKWARD:
                output *= weight[:, None]
                score *= weight[:, None]
            else:
                score *= weight[None, :]
    error = load_rows(errors + token * v_token + head * v_head, v_token, count, column, V, SIZE)
    output = matmul(score.to(DTYPE), error, PRECISION, output)
    store_rows(mean + row * V, G * V, count, column, output, V, SIZE)
