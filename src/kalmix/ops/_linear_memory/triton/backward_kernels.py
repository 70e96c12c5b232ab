"""Backward kernels of linear memories in Triton; they correspond to the forward kernels.

With D the gradients of the means, F the gradient of the memory at the end of a tile and F_0 at its start, the gradients
X of the values are

    X  = (I + N)^-T (S' D + W^ F)      F_0 = A(end, start) F + Q~' D - K~' X
    dS = D E',   dQ~ = D M',   dN = -X E',   dK~ = -X M',   dW^ = E F'

X is affine in F as the errors are in M: X = P + Z F. The gradient of a log-decay is computed as a sum over the pairs of
tokens on either side of it, never as a difference of larger sums, so no digits cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._linear_memory.triton.vector_decay import SUBTILE
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
    load_state_transposed,
    locate_program,
    locate_sequence,
    locate_tile,
    matmul,
    store_rows,
    store_state,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def solve_errors_backward(
    q, writes, grad_mean, gain, log_decay, to_end, scores, inverses, exit_map, local_grads, tile_table, length, tiles,
    q_token, q_head, w_token, w_head, g_token, g_head, G, Q_GROUP, W_GROUP,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, GAINS: tl.constexpr, SCALED: tl.constexpr, PRECOMPUTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store Z (`exit_map`) and P (`local_grads`) of a tile."""
    index, head, _block = locate_program(G, 1)
    token, count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    DTYPE: tl.constexpr = exit_map.dtype.element_ty
    t = tl.arange(0, SIZE)
    row = token * G + head
    q += token * q_token + head // Q_GROUP * q_head
    writes += token * w_token + head // W_GROUP * w_head
    transposed = load_rows_transposed(inverses + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
    if PRECOMPUTED:
        score = load_rows_transposed(scores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
    else:
        score = tl.zeros([SIZE, SIZE], tl.float32)
        for start in range(0, K, BLOCK):
            column = start + tl.arange(0, BLOCK)
            write = load_rows(writes, w_token, count, column, K, SIZE).to(DTYPE)
            query = load_rows_transposed(q, q_token, count, column, K, SIZE)
            score = matmul(write, query, PRECISION, score)
        if DECAYS:
            cumulative, _total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
            score *= pairwise_decay_transposed(cumulative, SIZE)
        else:
            score = tl.where(t[:, None] <= t[None, :], score, 0.0)
        if GAINS:
            score *= load_per_token(gain + row, count, G, SIZE)[:, None]
    score = matmul(transposed, score.to(DTYPE), PRECISION).to(DTYPE)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        grad = load_rows(grad_mean + token * g_token + head * g_head, g_token, count, column, V, SIZE)
        store_rows(local_grads + row * V, G * V, count, column, matmul(score, grad, PRECISION), V, SIZE)
    if SCALED:
        transposed = (transposed * load_per_token(to_end + row, count, G, SIZE)[None, :]).to(DTYPE)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        write = load_rows(writes, w_token, count, column, K, SIZE).to(DTYPE)
        store_rows(exit_map + row * K, G * K, count, column, matmul(transposed, write, PRECISION), K, SIZE)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan_memory_backward(
    q, k, exit_map, local_grads, grad_mean, grad_values, adjoints, grad_final, grad_prior, from_start, tile_decay,
    sequence_table, length, tiles,
    q_token, q_head, k_token, k_head, g_token, g_head, final_n, final_g, final_k, final_v, G, GROUP,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, PER_KEY: tl.constexpr, CORRECTS: tl.constexpr, STORE: tl.constexpr,
    NO_PRIOR: tl.constexpr, FINAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scan the gradient of the memory of one sequence and head over tiles in reverse, for some columns.

    Store those of the memory at the end of each tile and of the values if STORE. Unless FINAL, the gradient of the
    final memory is 0 and not read; gradients are then stored at the boundaries between tiles only, and `grad_values`
    must be `local_grads`, because the last tile of a sequence may leave them as they are. The gradient of the prior is
    stored unless NO_PRIOR.
    """
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = adjoints.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    tile, token, tokens = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    if NO_PRIOR and not FINAL:  # noqa: SIM102 - a compile-time condition needs its own `if`
        if tokens <= SIZE:
            return
    grad_final += sequence * final_n + head * final_g
    adjoint = ()
    for j in tl.static_range(BLOCKS):
        key = j * BLOCK + tl.arange(0, BLOCK)
        inside = (key < K)[:, None] & (column < V)[None, :]
        if FINAL:
            address = grad_final + key[:, None] * final_k + column[None, :] * final_v
            adjoint += (tl.load(address, mask=inside, other=0.0),)
        else:
            adjoint += (tl.zeros([BLOCK, VALUES], tl.float32),)
    q += head // GROUP * q_head
    k += head // GROUP * k_head
    grad_mean += head * g_head
    num_tiles = tl.cdiv(tokens, SIZE)
    for step in tl.range(0, num_tiles, num_stages=STAGES):
        i = num_tiles - 1 - step
        count = tl.minimum(tokens - i * SIZE, SIZE)
        at, state = token + i * SIZE, (tile + i) * G + head
        row = at * G + head
        if STORE:
            stored_at, is_stored = state, None
            if not FINAL:
                stored_at, is_stored = boundary_index(at + SIZE, SIZE) * G + head, step > 0
            for j in tl.static_range(BLOCKS):
                key = j * BLOCK + tl.arange(0, BLOCK)
                store_state(adjoints + stored_at * K * V, key, column, adjoint[j], K, V, is_stored)
        grad = load_rows(grad_mean + at * g_token, g_token, count, column, V, SIZE)
        scale = 1.0
        if DECAYS:
            scale = load_per_token(from_start + row, count, G, SIZE)[:, None]
            grad = (grad * scale).to(DTYPE)
        if CORRECTS:
            grad_value = load_rows(local_grads + row * V, G * V, count, column, V, SIZE).to(tl.float32)
            for j in tl.static_range(BLOCKS):
                key = j * BLOCK + tl.arange(0, BLOCK)
                rows = load_rows(exit_map + row * K, G * K, count, key, K, SIZE)
                grad_value = matmul(rows, adjoint[j].to(DTYPE), PRECISION, grad_value)
            if STORE:
                store_rows(grad_values + row * V, G * V, count, column, grad_value, V, SIZE)
            grad_value = (grad_value * -scale).to(DTYPE)
        decay = 1.0
        if DECAYS:
            decay = tl.load(tile_decay + state)
        updated = ()
        for j in tl.static_range(BLOCKS):
            key = j * BLOCK + tl.arange(0, BLOCK)
            if PER_KEY:
                decay = tl.load(tile_decay + state * K + key, mask=key < K, other=0.0)[:, None]
            query = load_rows_transposed(q + at * q_token, q_token, count, key, K, SIZE)
            updated_rows = matmul(query, grad, PRECISION, adjoint[j] * decay)
            if CORRECTS:
                key_rows = load_rows_transposed(k + at * k_token, k_token, count, key, K, SIZE)
                updated_rows = matmul(key_rows, grad_value, PRECISION, updated_rows)
            updated += (updated_rows,)
        adjoint = updated
    if not NO_PRIOR:
        for j in tl.static_range(BLOCKS):
            key = j * BLOCK + tl.arange(0, BLOCK)
            store_state(grad_prior + (sequence * G + head) * K * V, key, column, adjoint[j], K, V)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def pair_gradients(
    q, k, writes, errors, grad_mean, grad_values, gain, log_decay, dscores, dcorrections, dlog_decay, tile_table,
    length, tiles, q_token, q_head, k_token, k_head, w_token, w_head, v_token, v_head, g_token, g_head,
    G, GROUP, W_GROUP, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr, CORRECTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the products q_t' w_s in S and k_t' w_s in N, for all pairs of tokens of a tile.

    The gain of token s is not applied yet. With DECAYS, also store the gradients of log-decays through these pairs.
    """
    index, head, _block = locate_program(G, 1)
    token, count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    DTYPE: tl.constexpr = dscores.dtype.element_ty
    t = tl.arange(0, SIZE)
    row = token * G + head
    errors += token * v_token + head * v_head
    grad_mean += token * g_token + head * g_head
    strictly = t[:, None] > t[None, :]
    dscore = tl.zeros([SIZE, SIZE], tl.float32)
    dcorrection = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        error = load_rows_transposed(errors, v_token, count, column, V, SIZE)
        grad = load_rows(grad_mean, g_token, count, column, V, SIZE)
        dscore = matmul(grad, error, PRECISION, dscore)
        if CORRECTS:
            grad_value = load_rows(grad_values + row * V, G * V, count, column, V, SIZE)
            dcorrection = matmul(grad_value, error, PRECISION, dcorrection)
    if DECAYS:
        cumulative, _total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
        lag = pairwise_decay(cumulative, SIZE)
        dscore *= lag
        dcorrection *= -lag
    else:
        dscore = tl.where(t[:, None] >= t[None, :], dscore, 0.0)
        dcorrection = -dcorrection
    dcorrection = tl.where(strictly, dcorrection, 0.0)
    store_rows(dscores + row * SIZE, G * SIZE, count, t, dscore, SIZE, SIZE)
    if CORRECTS:
        store_rows(dcorrections + row * SIZE, G * SIZE, count, t, dcorrection, SIZE, SIZE)
    if DECAYS:
        q += token * q_token + head // GROUP * q_head
        k += token * k_token + head // GROUP * k_head
        writes += token * w_token + head // W_GROUP * w_head
        score = tl.zeros([SIZE, SIZE], tl.float32)
        correction = tl.zeros([SIZE, SIZE], tl.float32)
        for start in range(0, K, BLOCK):
            key = start + tl.arange(0, BLOCK)
            write = load_rows_transposed(writes, w_token, count, key, K, SIZE).to(DTYPE)
            score = matmul(load_rows(q, q_token, count, key, K, SIZE), write, PRECISION, score)
            if CORRECTS:
                key_rows = load_rows(k, k_token, count, key, K, SIZE)
                correction = matmul(key_rows, write, PRECISION, correction)
        pairs = tl.where(strictly, dscore * score + dcorrection * correction, 0.0)
        if GAINS:
            pairs *= load_per_token(gain + row, count, G, SIZE)[None, :]
        pair_sums = matmul(tl.where(t[:, None] <= t[None, :], 1.0, 0.0), pairs, "tf32x3")
        tl.store(dlog_decay + row + t * G, tl.sum(tl.where(strictly, pair_sums, 0.0), 1), mask=t < count)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "tokens"])
def signal_gradients(
    q, k, writes, errors, grad_mean, grad_values, gain, log_decay, tile_decay, states, adjoints, dscores, dcorrections,
    dq, dk, dwrites, dgain, dlog_decay, tile_table, length, tiles, tokens,
    q_token, q_head, k_token, k_head, w_token, w_head, v_token, v_head, g_token, g_head, G, GROUP, W_GROUP,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, PER_KEY: tl.constexpr, GAINS: tl.constexpr, VECTOR: tl.constexpr, CORRECTS: tl.constexpr,
    NO_PRIOR: tl.constexpr, FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store gradients of the queries, keys and write vectors of a tile, and partial gradients of gains and log-decays.

    A program does so for some columns, and sums the gradients of gains and log-decays over these columns only. NO_PRIOR
    and FINAL are those of the scans.

    If PER_KEY, q, k and `writes` have decays folded in. Then store only the gradients through the memory. In place of
    those of log-decays, store the gradient that all log-decays of a subtile share, through the memory and through the
    decays between the subtile and the edges of the tile: sums over tokens, computed as products with ones and zeros.
    """
    index, head, block = locate_program(G, (K + BLOCK - 1) // BLOCK)
    token, count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    DTYPE: tl.constexpr = states.dtype.element_ty
    t = tl.arange(0, SIZE)
    key = block * BLOCK + tl.arange(0, BLOCK)
    row = token * G + head
    errors += token * v_token + head * v_head
    grad_mean += token * g_token + head * g_head
    state_at, has_state, adjoint_at, has_adjoint = index.to(tl.int64), None, index.to(tl.int64), None
    if NO_PRIOR:
        state_at, has_state = boundary_index(token, SIZE), has_neighbour(tile_table, index, FIRST_TILE)
    if not FINAL:
        adjoint_at, has_adjoint = boundary_index(token + SIZE, SIZE), has_neighbour(tile_table, index, LAST_TILE)
    states += (state_at * G + head) * K * V
    adjoints += (adjoint_at * G + head) * K * V
    grad_query = tl.zeros([SIZE, BLOCK], tl.float32)
    grad_key = tl.zeros([SIZE, BLOCK], tl.float32)
    grad_write = tl.zeros([SIZE, BLOCK], tl.float32)
    grad_total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        state = load_state_transposed(states, key, column, K, V, has_state)
        adjoint = load_state_transposed(adjoints, key, column, K, V, has_adjoint)
        grad = load_rows(grad_mean, g_token, count, column, V, SIZE)
        grad_query = matmul(grad, state, PRECISION, grad_query)
        error = load_rows(errors, v_token, count, column, V, SIZE)
        grad_write = matmul(error, adjoint, PRECISION, grad_write)
        if CORRECTS:
            grad_value = load_rows(grad_values + row * V, G * V, count, column, V, SIZE)
            grad_key = matmul(grad_value, state, PRECISION, grad_key)
        if DECAYS or PER_KEY:  # loaded again: an operand of a product in flight must have no other use
            state_rows = load_state(states, key, column, K, V, has_state).to(tl.float32)
            adjoint_rows = load_state(adjoints, key, column, K, V, has_adjoint).to(tl.float32)
            grad_total += tl.sum(state_rows * adjoint_rows, 1)
    grad_key = -grad_key
    if PER_KEY:
        SUBTILES: tl.constexpr = SIZE // SUBTILE
        at = (index.to(tl.int64) * G + head) * K + key
        grad_total *= tl.load(tile_decay + at, mask=key < K, other=0.0)
        if SUBTILES == 1:
            tl.store(dlog_decay + at, grad_total, mask=key < K)
        else:
            i, subtile = tl.arange(0, 16)[:, None], t[None, :] // SUBTILE
            write = load_rows(writes + token * w_token + head // W_GROUP * w_head, w_token, count, key, K, SIZE)
            products = write * grad_write
            common_grad = matmul(tl.where(subtile < i, 1.0, 0.0).to(DTYPE), products.to(DTYPE), PRECISION)
            query = load_rows(q + token * q_token + head // GROUP * q_head, q_token, count, key, K, SIZE)
            products = query * grad_query
            if CORRECTS:
                key_rows = load_rows(k + token * k_token + head // GROUP * k_head, k_token, count, key, K, SIZE)
                products += key_rows * grad_key
            ones = tl.where(subtile > i, 1.0, 0.0).to(DTYPE)
            common_grad = matmul(ones, products.to(DTYPE), PRECISION, common_grad) + grad_total[None, :]
            at = ((index.to(tl.int64) * SUBTILES + i) * G + head) * K + key[None, :]
            tl.store(dlog_decay + at, common_grad, mask=(i < SUBTILES) & (key < K)[None, :])
    else:
        query = load_rows(q + token * q_token + head // GROUP * q_head, q_token, count, key, K, SIZE)
        key_rows = load_rows(k + token * k_token + head // GROUP * k_head, k_token, count, key, K, SIZE)
        write = key_rows
        if VECTOR:
            writes += token * w_token + head // W_GROUP * w_head
            write = load_rows(writes, w_token, count, key, K, SIZE).to(DTYPE)
        weight = 1.0
        weighted = write
        if GAINS:
            weight = load_per_token(gain + row, count, G, SIZE)[:, None]
            weighted = (write * weight).to(DTYPE)
        if DECAYS:
            cumulative, total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
            entry = tl.exp(cumulative.to(tl.float32))[:, None]
            grad_query *= entry
            grad_key *= entry
            grad_write *= tl.exp((total - cumulative).to(tl.float32))[:, None]
            entry_terms = tl.sum(query.to(tl.float32) * grad_query + key_rows.to(tl.float32) * grad_key, 1)
            exit_terms = tl.sum(weight * write.to(tl.float32) * grad_write, 1)
            grad_decay = tl.sum(tl.where(t[:, None] <= t[None, :], entry_terms[None, :], exit_terms[None, :]), 1)
            grad_decay += tl.exp(total.to(tl.float32)) * tl.sum(grad_total, 0)
            tl.store(dlog_decay + (block + 1) * tokens * G + row + t * G, grad_decay, mask=t < count)
        dscore = load_rows(dscores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
        grad_query = matmul(dscore, weighted, PRECISION, grad_query)
        dscore = load_rows_transposed(dscores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
        grad_write = matmul(dscore, query, PRECISION, grad_write)
        if CORRECTS:
            dcorrection = load_rows(dcorrections + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
            grad_key = matmul(dcorrection, weighted, PRECISION, grad_key)
            dcorrection = load_rows_transposed(dcorrections + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
            grad_write = matmul(dcorrection, key_rows, PRECISION, grad_write)
        if GAINS:
            grad_gain = tl.sum(write.to(tl.float32) * grad_write, 1)
            tl.store(dgain + block * tokens * G + row + t * G, grad_gain, mask=t < count)
            grad_write *= weight
        if not VECTOR:
            grad_key += grad_write
    store_rows(dq + row * K, G * K, count, key, grad_query, K, SIZE)
    if CORRECTS or not PER_KEY:
        store_rows(dk + row * K, G * K, count, key, grad_key, K, SIZE)
    if VECTOR or PER_KEY:
        store_rows(dwrites + row * K, G * K, count, key, grad_write, K, SIZE)
