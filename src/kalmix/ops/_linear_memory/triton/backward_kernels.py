"""Linear memories in Triton, backward: the adjoints of `triton_memory`, in as many passes and the same shapes.

With D the adjoints of the means, M^ the adjoint of the memory at the exit of a tile and X that of the values,

    X  = (I + N)^-T (S' D + W^ M^')      M^ at the entry = A(exit, entry) M^ + Q~' D - K~' X
    dS = D E',   dQ~ = D M',   dN = -X E',   dK~ = -X M',   dW^ = E M^'

so a key that corrects is a query whose answer was subtracted, and X = P + Z M^ as the errors were U - W M. Gradients of
log-decays are sums over the pairs that a decay lies between, not differences of sums over all: nothing cancels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.decay_products import log_decay_from_start, pairwise_decay, pairwise_decay_transposed
from kalmix.ops._shared.triton.tiles import (
    UNSPECIALIZED,
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
def solve_back(
    q, writes, grad_mean, gain, log_decay, leaving, scores, inverses, fast, free, table, length, tiles,
    q_token, q_head, w_token, w_head, g_token, g_head, G, Q_SHARE, W_SHARE,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, GAINS: tl.constexpr, SCALED: tl.constexpr, GIVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Z (`fast`) and P (`free`) of a tile."""
    index, head, _part = locate_program(G, 1)
    token, count = locate_tile(table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = fast.dtype.element_ty
    t = tl.arange(0, SIZE)
    row = token * G + head
    q += token * q_token + head // Q_SHARE * q_head
    writes += token * w_token + head // W_SHARE * w_head
    transposed = load_rows_transposed(inverses + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
    if GIVEN:
        score = load_rows_transposed(scores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
    else:
        score = tl.zeros([SIZE, SIZE], tl.float32)
        for start in range(0, K, BLOCK):
            column = start + tl.arange(0, BLOCK)
            write = load_rows(writes, w_token, count, column, K, SIZE).to(KIND)
            query = load_rows_transposed(q, q_token, count, column, K, SIZE)
            score = matmul(write, query, PRECISION, score)
        if DECAYS:
            since, _total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
            score *= pairwise_decay_transposed(since, SIZE)
        else:
            score = tl.where(t[:, None] <= t[None, :], score, 0.0)
        if GAINS:
            score *= load_per_token(gain + row, count, G, SIZE)[:, None]
    score = matmul(transposed, score.to(KIND), PRECISION).to(KIND)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        grad = load_rows(grad_mean + token * g_token + head * g_head, g_token, count, column, V, SIZE)
        store_rows(free + row * V, G * V, count, column, matmul(score, grad, PRECISION), V, SIZE)
    if SCALED:
        transposed = (transposed * load_per_token(leaving + row, count, G, SIZE)[None, :]).to(KIND)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        write = load_rows(writes, w_token, count, column, K, SIZE).to(KIND)
        store_rows(fast + row * K, G * K, count, column, matmul(transposed, write, PRECISION), K, SIZE)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def carry_back(
    q, k, fast, free, grad_mean, grad_values, adjoints, grad_last, grad_prior, entering, across, runs, length, tiles,
    q_token, q_head, k_token, k_head, g_token, g_head, last_n, last_g, last_k, last_v, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, KEYED: tl.constexpr, CORRECTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The adjoint of the memory of one sequence and head, some of its columns, from tile to tile, last first."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    KIND: tl.constexpr = adjoints.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    tile, token, tokens = locate_sequence(runs, sequence, length, tiles, PACKED)
    grad_last += sequence * last_n + head * last_g
    adjoint = ()
    for j in tl.static_range(BLOCKS):
        key = j * BLOCK + tl.arange(0, BLOCK)
        inside = (key < K)[:, None] & (column < V)[None, :]
        adjoint += (tl.load(grad_last + key[:, None] * last_k + column[None, :] * last_v, mask=inside, other=0.0),)
    q += head // SHARE * q_head
    k += head // SHARE * k_head
    grad_mean += head * g_head
    pieces = tl.cdiv(tokens, SIZE)
    for step in tl.range(0, pieces, num_stages=STAGES):
        i = pieces - 1 - step
        count = tl.minimum(tokens - i * SIZE, SIZE)
        at, state = token + i * SIZE, (tile + i) * G + head
        row = at * G + head
        for j in tl.static_range(BLOCKS):
            key = j * BLOCK + tl.arange(0, BLOCK)
            store_state(adjoints + state * K * V, key, column, adjoint[j], K, V)
        grad = load_rows(grad_mean + at * g_token, g_token, count, column, V, SIZE)
        scale = 1.0
        if DECAYS:
            scale = load_per_token(entering + row, count, G, SIZE)[:, None]
            grad = (grad * scale).to(KIND)
        if CORRECTS:
            wanted = load_rows(free + row * V, G * V, count, column, V, SIZE).to(tl.float32)
            for j in tl.static_range(BLOCKS):
                key = j * BLOCK + tl.arange(0, BLOCK)
                reader = load_rows(fast + row * K, G * K, count, key, K, SIZE)
                wanted = matmul(reader, adjoint[j].to(KIND), PRECISION, wanted)
            store_rows(grad_values + row * V, G * V, count, column, wanted, V, SIZE)
            wanted = (wanted * -scale).to(KIND)
        kept = 1.0
        if DECAYS:
            kept = tl.load(across + state)
        moved = ()
        for j in tl.static_range(BLOCKS):
            key = j * BLOCK + tl.arange(0, BLOCK)
            if KEYED:
                kept = tl.load(across + state * K + key, mask=key < K, other=0.0)[:, None]
            query = load_rows_transposed(q + at * q_token, q_token, count, key, K, SIZE)
            past = matmul(query, grad, PRECISION, adjoint[j] * kept)
            if CORRECTS:
                known = load_rows_transposed(k + at * k_token, k_token, count, key, K, SIZE)
                past = matmul(known, wanted, PRECISION, past)
            moved += (past,)
        adjoint = moved
    for j in tl.static_range(BLOCKS):
        key = j * BLOCK + tl.arange(0, BLOCK)
        store_state(grad_prior + (sequence * G + head) * K * V, key, column, adjoint[j], K, V)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def pair_gradients(
    q, k, writes, errors, grad_mean, grad_values, gain, log_decay, dscores, dcorrections, dlog_decay, table,
    length, tiles, q_token, q_head, k_token, k_head, w_token, w_head, v_token, v_head, g_token, g_head,
    G, SHARE, W_SHARE, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr, CORRECTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the pairs of tokens of a tile: of q_t' k_s, the rest of S[t, s] applied, and of k_t' k_s in N.

    The gain of token s is still to come. Also what the decays between the two tokens of a pair get from it.
    """
    index, head, _part = locate_program(G, 1)
    token, count = locate_tile(table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = dscores.dtype.element_ty
    t = tl.arange(0, SIZE)
    row = token * G + head
    errors += token * v_token + head * v_head
    grad_mean += token * g_token + head * g_head
    strictly = t[:, None] > t[None, :]
    asked = tl.zeros([SIZE, SIZE], tl.float32)
    fixed = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        error = load_rows_transposed(errors, v_token, count, column, V, SIZE)
        grad = load_rows(grad_mean, g_token, count, column, V, SIZE)
        asked = matmul(grad, error, PRECISION, asked)
        if CORRECTS:
            wanted = load_rows(grad_values + row * V, G * V, count, column, V, SIZE)
            fixed = matmul(wanted, error, PRECISION, fixed)
    if DECAYS:
        since, _total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
        lag = pairwise_decay(since, SIZE)
        asked *= lag
        fixed *= -lag
    else:
        asked = tl.where(t[:, None] >= t[None, :], asked, 0.0)
        fixed = -fixed
    fixed = tl.where(strictly, fixed, 0.0)
    store_rows(dscores + row * SIZE, G * SIZE, count, t, asked, SIZE, SIZE)
    if CORRECTS:
        store_rows(dcorrections + row * SIZE, G * SIZE, count, t, fixed, SIZE, SIZE)
    if DECAYS:
        q += token * q_token + head // SHARE * q_head
        k += token * k_token + head // SHARE * k_head
        writes += token * w_token + head // W_SHARE * w_head
        score = tl.zeros([SIZE, SIZE], tl.float32)
        correction = tl.zeros([SIZE, SIZE], tl.float32)
        for start in range(0, K, BLOCK):
            key = start + tl.arange(0, BLOCK)
            write = load_rows_transposed(writes, w_token, count, key, K, SIZE).to(KIND)
            score = matmul(load_rows(q, q_token, count, key, K, SIZE), write, PRECISION, score)
            if CORRECTS:
                known = load_rows(k, k_token, count, key, K, SIZE)
                correction = matmul(known, write, PRECISION, correction)
        pairs = tl.where(strictly, asked * score + fixed * correction, 0.0)
        if GAINS:
            pairs *= load_per_token(gain + row, count, G, SIZE)[None, :]
        until = matmul(tl.where(t[:, None] <= t[None, :], 1.0, 0.0), pairs, "tf32x3")
        tl.store(dlog_decay + row + t * G, tl.sum(tl.where(strictly, until, 0.0), 1), mask=t < count)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "tokens"])
def gradients(
    q, k, writes, errors, grad_mean, grad_values, gain, log_decay, states, adjoints, dscores, dcorrections,
    dq, dk, dwrites, dgain, dlog_decay, table, length, tiles, tokens,
    q_token, q_head, k_token, k_head, w_token, w_head, v_token, v_head, g_token, g_head, G, SHARE, W_SHARE,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, KEYED: tl.constexpr, GAINS: tl.constexpr, VECTOR: tl.constexpr, CORRECTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's queries, keys and write vectors, some columns; those of gains and decays, their share.

    KEYED, q, k and `writes` are those with decays folded in: here are only the shares of their gradients that come by
    the memory, and the gradient of the decay across the tile in place of those of decays.
    """
    index, head, part = locate_program(G, (K + BLOCK - 1) // BLOCK)
    token, count = locate_tile(table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = states.dtype.element_ty
    t = tl.arange(0, SIZE)
    key = part * BLOCK + tl.arange(0, BLOCK)
    row = token * G + head
    errors += token * v_token + head * v_head
    grad_mean += token * g_token + head * g_head
    states += (index.to(tl.int64) * G + head) * K * V
    adjoints += (index.to(tl.int64) * G + head) * K * V
    by_query = tl.zeros([SIZE, BLOCK], tl.float32)
    by_key = tl.zeros([SIZE, BLOCK], tl.float32)
    by_write = tl.zeros([SIZE, BLOCK], tl.float32)
    by_state = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        state = load_state_transposed(states, key, column, K, V)
        adjoint = load_state_transposed(adjoints, key, column, K, V)
        grad = load_rows(grad_mean, g_token, count, column, V, SIZE)
        by_query = matmul(grad, state, PRECISION, by_query)
        error = load_rows(errors, v_token, count, column, V, SIZE)
        by_write = matmul(error, adjoint, PRECISION, by_write)
        if CORRECTS:
            wanted = load_rows(grad_values + row * V, G * V, count, column, V, SIZE)
            by_key = matmul(wanted, state, PRECISION, by_key)
        if DECAYS or KEYED:  # loaded again: what a product reads in flight must have no other reader
            held = load_state(states, key, column, K, V).to(tl.float32)
            by_state += tl.sum(held * load_state(adjoints, key, column, K, V).to(tl.float32), 1)
    by_key = -by_key
    if KEYED:
        tl.store(dlog_decay + (index.to(tl.int64) * G + head) * K + key, by_state, mask=key < K)
    else:
        query = load_rows(q + token * q_token + head // SHARE * q_head, q_token, count, key, K, SIZE)
        known = load_rows(k + token * k_token + head // SHARE * k_head, k_token, count, key, K, SIZE)
        write = known
        if VECTOR:
            writes += token * w_token + head // W_SHARE * w_head
            write = load_rows(writes, w_token, count, key, K, SIZE).to(KIND)
        weight = 1.0
        weighted = write
        if GAINS:
            weight = load_per_token(gain + row, count, G, SIZE)[:, None]
            weighted = (write * weight).to(KIND)
        if DECAYS:
            since, total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
            entry = tl.exp(since.to(tl.float32))[:, None]
            by_query *= entry
            by_key *= entry
            by_write *= tl.exp((total - since).to(tl.float32))[:, None]
            by_entry = tl.sum(query.to(tl.float32) * by_query + known.to(tl.float32) * by_key, 1)
            by_exit = tl.sum(weight * write.to(tl.float32) * by_write, 1)
            by_decay = tl.sum(tl.where(t[:, None] <= t[None, :], by_entry[None, :], by_exit[None, :]), 1)
            by_decay += tl.exp(total.to(tl.float32)) * tl.sum(by_state, 0)
            tl.store(dlog_decay + (part + 1) * tokens * G + row + t * G, by_decay, mask=t < count)
        asked = load_rows(dscores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
        by_query = matmul(asked, weighted, PRECISION, by_query)
        asked = load_rows_transposed(dscores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
        by_write = matmul(asked, query, PRECISION, by_write)
        if CORRECTS:
            fixed = load_rows(dcorrections + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
            by_key = matmul(fixed, weighted, PRECISION, by_key)
            fixed = load_rows_transposed(dcorrections + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
            by_write = matmul(fixed, known, PRECISION, by_write)
        if GAINS:
            by_gain = tl.sum(write.to(tl.float32) * by_write, 1)
            tl.store(dgain + part * tokens * G + row + t * G, by_gain, mask=t < count)
            by_write *= weight
        if not VECTOR:
            by_key += by_write
    store_rows(dq + row * K, G * K, count, key, by_query, K, SIZE)
    if CORRECTS or not KEYED:
        store_rows(dk + row * K, G * K, count, key, by_key, K, SIZE)
    if VECTOR or KEYED:
        store_rows(dwrites + row * K, G * K, count, key, by_write, K, SIZE)
