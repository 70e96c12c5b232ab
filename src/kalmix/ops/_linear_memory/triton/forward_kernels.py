"""Linear memories in Triton, forward: what `additive` and `delta` share, which is all but the correction.

In a tile of tokens entered with memory M, with A(t, s) the decay from token s to token t, w the write vectors,

    mean_t = q~_t' M + sum_{s <= t} S[t, s] e_s,     S[t, s] = q_t' A(t, s) w_s,     q~_t = A(t, entry) q_t
    M'     = A(exit, entry) M + sum_s w^_s e_s',     w^_s = A(exit, s) w_s

where e are the values or, under a correction, the errors E = (I + N)^-1 (V - K~ M), N[t, s] = k_t' A(t, s) w_s
for t > s, equal to U - W M with U = (I + N)^-1 V and W = (I + N)^-1 K~. So there are three passes:

1. `solve` (corrections only): U and W of every tile, at once;
2. `carry`: the memory from tile to tile, one after another, noting it at every entry, and the errors;
3. `read`: every tile's means, at once.

A decay per head is a factor of rows: it never touches keys, so q~ is q, and what scales its products is a number a
token. Decays per key are folded into q~, k~, w^, S and N beforehand (`triton_keys`), after which there are none.
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
    locate_program,
    locate_sequence,
    locate_tile,
    matmul,
    num_levels,
    store_rows,
    store_state,
)


@triton.jit
def inverse_of(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 for strictly lower triangular `[SIZE, SIZE]` float32, block by block.

    With X the inverses of the diagonal blocks of h rows and B what `lower` has between neighbours, those of blocks of
    2 h rows are X - X B X.
    """
    t = tl.arange(0, SIZE)
    apart = t[:, None] ^ t[None, :]
    inverse = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, lower, 0.0)
    for level in range(1, num_levels(SIZE)):
        neighbours = tl.where(apart >> level == 1, lower, 0.0)
        inverse -= matmul(matmul(inverse, neighbours, PRECISION), inverse, PRECISION)
    return inverse


@triton.jit(do_not_specialize=UNSPECIALIZED)
def solve(
    k, writes, v, gain, log_decay, entering, corrections, inverses, fast, free, table, length, tiles,
    k_token, k_head, w_token, w_head, v_token, v_head, G, K_SHARE, W_SHARE,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, GAINS: tl.constexpr, GIVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(I + N)^-1 of a tile, and with it W (`fast`: it goes with the memory) and U (`free` of it)."""
    index, head, _part = locate_program(G, 1)
    token, count = locate_tile(table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = fast.dtype.element_ty
    t = tl.arange(0, SIZE)
    row = token * G + head
    k += token * k_token + head // K_SHARE * k_head
    if GIVEN:
        lower = load_rows(corrections + row * SIZE, G * SIZE, count, t, SIZE, SIZE).to(tl.float32)
    else:
        writes += token * w_token + head // W_SHARE * w_head
        lower = tl.zeros([SIZE, SIZE], tl.float32)
        for start in range(0, K, BLOCK):
            column = start + tl.arange(0, BLOCK)
            key = load_rows(k, k_token, count, column, K, SIZE)
            write = load_rows_transposed(writes, w_token, count, column, K, SIZE).to(KIND)
            lower = matmul(key, write, PRECISION, lower)
        if DECAYS:
            since, _total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
            lower *= pairwise_decay(since, SIZE)
        if GAINS:
            lower *= load_per_token(gain + row, count, G, SIZE)[None, :]
        lower = tl.where(t[:, None] > t[None, :], lower, 0.0)
    inverse = inverse_of(lower, SIZE, PRECISION).to(KIND)
    store_rows(inverses + row * SIZE, G * SIZE, count, t, inverse, SIZE, SIZE)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = load_rows(v + token * v_token + head * v_head, v_token, count, column, V, SIZE)
        store_rows(free + row * V, G * V, count, column, matmul(inverse, value, PRECISION), V, SIZE)
    if DECAYS:
        scale = load_per_token(entering + row, count, G, SIZE)
        inverse = (inverse * scale[None, :]).to(KIND)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        key = load_rows(k, k_token, count, column, K, SIZE)
        store_rows(fast + row * K, G * K, count, column, matmul(inverse, key, PRECISION), K, SIZE)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def carry(
    writes, fast, free, errors, states, prior, last, leaving, across, runs, length, tiles,
    w_token, w_head, v_token, v_head, prior_n, prior_g, prior_k, prior_v, G, W_SHARE,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, KEYED: tl.constexpr, SCALED: tl.constexpr, CORRECTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The memory of one sequence and head, some of its columns, from tile to tile."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    KIND: tl.constexpr = states.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    tile, token, tokens = locate_sequence(runs, sequence, length, tiles, PACKED)
    prior += sequence * prior_n + head * prior_g
    memory = ()
    for j in tl.static_range(BLOCKS):
        key = j * BLOCK + tl.arange(0, BLOCK)
        inside = (key < K)[:, None] & (column < V)[None, :]
        memory += (tl.load(prior + key[:, None] * prior_k + column[None, :] * prior_v, mask=inside, other=0.0),)
    writes += head // W_SHARE * w_head
    free += head * v_head
    for i in tl.range(0, tl.cdiv(tokens, SIZE), num_stages=STAGES):
        count = tl.minimum(tokens - i * SIZE, SIZE)
        at, state = token + i * SIZE, (tile + i) * G + head
        row = at * G + head
        for j in tl.static_range(BLOCKS):
            key = j * BLOCK + tl.arange(0, BLOCK)
            store_state(states + state * K * V, key, column, memory[j], K, V)
        error = load_rows(free + at * v_token, v_token, count, column, V, SIZE)
        if CORRECTS:
            known = tl.zeros([SIZE, VALUES], tl.float32)
            for j in tl.static_range(BLOCKS):
                key = j * BLOCK + tl.arange(0, BLOCK)
                reader = load_rows(fast + row * K, G * K, count, key, K, SIZE)
                known = matmul(reader, memory[j].to(KIND), PRECISION, known)
            error = error.to(tl.float32) - known
            store_rows(errors + row * V, G * V, count, column, error, V, SIZE)
        if SCALED:
            error = error.to(tl.float32) * load_per_token(leaving + row, count, G, SIZE)[:, None]
        error = error.to(KIND)
        kept = 1.0
        if DECAYS:
            kept = tl.load(across + state)
        moved = ()
        for j in tl.static_range(BLOCKS):
            key = j * BLOCK + tl.arange(0, BLOCK)
            if KEYED:
                kept = tl.load(across + state * K + key, mask=key < K, other=0.0)[:, None]
            write = load_rows_transposed(writes + at * w_token, w_token, count, key, K, SIZE).to(KIND)
            moved += (matmul(write, error, PRECISION, memory[j] * kept),)
        memory = moved
    for j in tl.static_range(BLOCKS):
        key = j * BLOCK + tl.arange(0, BLOCK)
        store_state(last + (sequence * G + head) * K * V, key, column, memory[j], K, V)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def read(
    q, writes, errors, gain, log_decay, scores, states, mean, table, length, tiles,
    q_token, q_head, w_token, w_head, v_token, v_head, G, Q_SHARE, W_SHARE,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr, GIVEN: tl.constexpr, BACK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Means of a tile, some columns of them.

    BACK, the same read the other way: by write vectors, from the adjoints of the memory at the exit and of the means
    (in place of errors) at later tokens, which are the gradients of the values.
    """
    index, head, part = locate_program(G, (V + VALUES - 1) // VALUES)
    column = part * VALUES + tl.arange(0, VALUES)
    token, count = locate_tile(table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = states.dtype.element_ty
    t = tl.arange(0, SIZE)
    row = token * G + head
    q += token * q_token + head // Q_SHARE * q_head
    writes += token * w_token + head // W_SHARE * w_head
    states += (index.to(tl.int64) * G + head) * K * V
    answer = tl.zeros([SIZE, VALUES], tl.float32)
    score = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, K, BLOCK):
        key = start + tl.arange(0, BLOCK)
        if BACK:
            reader = load_rows(writes, w_token, count, key, K, SIZE).to(KIND)
        else:
            reader = load_rows(q, q_token, count, key, K, SIZE)
        answer = matmul(reader, load_state(states, key, column, K, V), PRECISION, answer)
        if not GIVEN:
            if BACK:
                other = load_rows_transposed(q, q_token, count, key, K, SIZE)
            else:
                other = load_rows_transposed(writes, w_token, count, key, K, SIZE).to(KIND)
            score = matmul(reader, other, PRECISION, score)
    if GIVEN:
        if BACK:
            score = load_rows_transposed(scores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
        else:
            score = load_rows(scores + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
    else:
        if DECAYS:
            since, total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
            if BACK:
                answer *= tl.exp((total - since).to(tl.float32))[:, None]
                score *= pairwise_decay_transposed(since, SIZE)
            else:
                answer *= tl.exp(since.to(tl.float32))[:, None]
                score *= pairwise_decay(since, SIZE)
        elif BACK:
            score = tl.where(t[:, None] <= t[None, :], score, 0.0)
        else:
            score = tl.where(t[:, None] >= t[None, :], score, 0.0)
        if GAINS:
            weight = load_per_token(gain + row, count, G, SIZE)
            if BACK:
                answer *= weight[:, None]
                score *= weight[:, None]
            else:
                score *= weight[None, :]
    error = load_rows(errors + token * v_token + head * v_head, v_token, count, column, V, SIZE)
    answer = matmul(score.to(KIND), error, PRECISION, answer)
    store_rows(mean + row * V, G * V, count, column, answer, V, SIZE)
