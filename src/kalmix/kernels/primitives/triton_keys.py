"""Decays per key: folded into queries, keys and write vectors before a memory is filtered, and unfolded after.

Two tokens s < t of a tile differ in a highest bit h of their places, and lie in the lower and the upper half of a block
of 2 h. The decay between them splits where the halves meet into two factors, each at most 1, of one token and one key:
so a matrix product gives all pairs of a level, and there are log2(SIZE) levels. Exponents are sums of log-decays, never
differences of such sums, so no decay loses the digits of another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.kernels.primitives.triton_tiles import (
    LOOSE,
    levels_of,
    load_columns,
    load_per_token,
    load_rows,
    product,
    store_rows,
    tile_of,
)


@triton.jit
def between_halves(level, SIZE: tl.constexpr):
    """Whose log-decays lie between token t and where the halves of its block of 2^(level + 1) meet, `[t, i]`."""
    t = tl.arange(0, SIZE)
    upper = ((t >> level) & 1 == 1)[:, None]
    reach = tl.where(upper, t[None, :] <= t[:, None], t[None, :] > t[:, None])
    return reach & ((t[:, None] ^ t[None, :]) >> level == 0)


@triton.jit
def reached_from(level, SIZE: tl.constexpr):
    """The same, `[i, t]`."""
    t = tl.arange(0, SIZE)
    upper = ((t >> level) & 1 == 1)[None, :]
    reach = tl.where(upper, t[:, None] <= t[None, :], t[:, None] > t[None, :])
    return reach & ((t[:, None] ^ t[None, :]) >> level == 0)


@triton.jit
def thirds_of(x):
    """A float32 tensor as the sum of three in bfloat16, to the last bit."""
    high = x.to(tl.bfloat16)
    left = x - high.to(tl.float32)
    middle = left.to(tl.bfloat16)
    return high, middle, (left - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def decay_over(reach, thirds, PRECISION: tl.constexpr):
    """The decay of each token over those it reaches, rounded like float32 whatever products of signals are."""
    reach = tl.where(reach, 1.0, 0.0).to(tl.bfloat16)
    total = product(reach, thirds[0], PRECISION)
    total = product(reach, thirds[1], PRECISION, total)
    return tl.exp(product(reach, thirds[2], PRECISION, total))


@triton.jit
def load_writes(writes, stride, gain, G, count, key, K: tl.constexpr, SIZE: tl.constexpr, GAINS: tl.constexpr):
    """Write vectors times their gains, float32 `[SIZE, keys]`."""
    write = load_rows(writes, stride, count, key, K, SIZE).to(tl.float32)
    if GAINS:
        write *= load_per_token(gain, count, G, SIZE)[:, None]
    return write


@triton.jit(do_not_specialize=LOOSE)
def fold(
    q, k, writes, gain, log_decay, q_in, k_in, w_out, across, scores, corrections, table, length, tiles,
    q_token, q_head, k_token, k_head, w_token, w_head, d_token, d_head, G, SHARE, W_SHARE,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, GAINS: tl.constexpr,
    CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q~, k~, w^, S and N of a tile, and the decay across it."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = q_in.dtype.element_ty
    t = tl.arange(0, SIZE)
    apart = tl.where(t[:, None] > t[None, :], t[:, None] ^ t[None, :], 0)
    row = token * G + head
    score = tl.zeros([SIZE, SIZE], tl.float32)
    correction = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, K, BLOCK):
        key = start + tl.arange(0, BLOCK)
        query = load_rows(q + token * q_token + head // SHARE * q_head, q_token, count, key, K, SIZE).to(tl.float32)
        known = load_rows(k + token * k_token + head // SHARE * k_head, k_token, count, key, K, SIZE).to(tl.float32)
        at = writes + token * w_token + head // W_SHARE * w_head
        write = load_writes(at, w_token, gain + row, G, count, key, K, SIZE, GAINS)
        each = load_rows(log_decay + token * d_token + head * d_head, d_token, count, key, K, SIZE).to(tl.float32)
        thirds = thirds_of(each)
        tl.store(across + (index.to(tl.int64) * G + head) * K + key, tl.exp(tl.sum(each, 0)), mask=key < K)
        score += tl.where(t[:, None] == t[None, :], tl.sum(query * write, 1)[:, None], 0.0)
        for level in range(levels_of(SIZE)):
            fade = decay_over(between_halves(level, SIZE), thirds, PRECISION)
            faded = tl.trans((write * fade).to(KIND))
            pairs = apart >> level == 1
            score += tl.where(pairs, product((query * fade).to(KIND), faded, PRECISION), 0.0)
            if CORRECTS:
                correction += tl.where(pairs, product((known * fade).to(KIND), faded, PRECISION), 0.0)
        entry = decay_over(t[:, None] >= t[None, :], thirds, PRECISION)
        store_rows(q_in + row * K, G * K, count, key, query * entry, K, SIZE)
        if CORRECTS:
            store_rows(k_in + row * K, G * K, count, key, known * entry, K, SIZE)
        rest = decay_over(t[:, None] < t[None, :], thirds, PRECISION)
        store_rows(w_out + row * K, G * K, count, key, write * rest, K, SIZE)
    store_rows(scores + row * SIZE, G * SIZE, count, t, score, SIZE, SIZE)
    if CORRECTS:
        store_rows(corrections + row * SIZE, G * SIZE, count, t, correction, SIZE, SIZE)


@triton.jit(do_not_specialize=[*LOOSE, "tokens"])
def unfold(
    q, k, writes, gain, log_decay, across, grad_q_in, grad_k_in, grad_w_out, grad_across, dscores, dcorrections,
    dq, dk, dwrites, dgain, dlog_decay, table, length, tiles, tokens,
    q_token, q_head, k_token, k_head, w_token, w_head, d_token, d_head, G, SHARE, W_SHARE,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, GAINS: tl.constexpr,
    VECTOR: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile, some columns, from those of what it was folded into.

    A log-decay is in every decay from before it to after it: of a level, it gets the readers' share of the tokens from
    it to the end of its half if that is the upper one, the writers' of those before it if the lower.
    """
    index, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = grad_q_in.dtype.element_ty
    key, t = part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
    row = token * G + head
    apart = t[:, None] ^ t[None, :]
    query = load_rows(q + token * q_token + head // SHARE * q_head, q_token, count, key, K, SIZE).to(tl.float32)
    known = load_rows(k + token * k_token + head // SHARE * k_head, k_token, count, key, K, SIZE).to(tl.float32)
    writes += token * w_token + head // W_SHARE * w_head
    write = load_writes(writes, w_token, gain + row, G, count, key, K, SIZE, GAINS)
    each = load_rows(log_decay + token * d_token + head * d_head, d_token, count, key, K, SIZE).to(tl.float32)
    thirds = thirds_of(each)
    scores = dscores + row * SIZE
    asked = load_rows(scores, G * SIZE, count, t, SIZE, SIZE)
    fixed = asked
    if CORRECTS:
        fixed = load_rows(dcorrections + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
    same = tl.load(scores + t * (G * SIZE + 1), mask=t < count, other=0.0).to(tl.float32)[:, None]
    by_query = same * write
    by_key = tl.zeros([SIZE, BLOCK], tl.float32)
    by_decay = tl.zeros([SIZE, BLOCK], tl.float32)
    for level in range(levels_of(SIZE)):  # what upper halves read
        fade = decay_over(between_halves(level, SIZE), thirds, PRECISION)
        faded = (write * fade).to(KIND)
        pairs = apart >> level == 1
        readers = product(tl.where(pairs, asked, 0.0), faded, PRECISION) * fade
        by_query += readers
        shares = query * readers
        if CORRECTS:
            readers = product(tl.where(pairs, fixed, 0.0), faded, PRECISION) * fade
            by_key += readers
            shares += known * readers
        reached = reached_from(level, SIZE)
        by_decay = product(tl.where(reached, 1.0, 0.0).to(KIND), shares.to(KIND), PRECISION, by_decay)
    asked = load_columns(scores, G * SIZE, count, t, SIZE, SIZE)
    if CORRECTS:
        fixed = load_columns(dcorrections + row * SIZE, G * SIZE, count, t, SIZE, SIZE)
    by_write = same * query
    for level in range(levels_of(SIZE)):  # what lower halves write
        fade = decay_over(between_halves(level, SIZE), thirds, PRECISION)
        pairs = apart >> level == 1
        writers = product(tl.where(pairs, asked, 0.0), (query * fade).to(KIND), PRECISION)
        if CORRECTS:
            writers = product(tl.where(pairs, fixed, 0.0), (known * fade).to(KIND), PRECISION, writers)
        writers *= fade
        by_write += writers
        reached = reached_from(level, SIZE)
        by_decay = product(tl.where(reached, 1.0, 0.0).to(KIND), (write * writers).to(KIND), PRECISION, by_decay)

    entry = decay_over(t[:, None] >= t[None, :], thirds, PRECISION)
    readers = entry * load_rows(grad_q_in + row * K, G * K, count, key, K, SIZE).to(tl.float32)
    by_query += readers
    shares = query * readers
    if CORRECTS:
        readers = entry * load_rows(grad_k_in + row * K, G * K, count, key, K, SIZE).to(tl.float32)
        by_key += readers
        shares += known * readers
    writers = decay_over(t[:, None] < t[None, :], thirds, PRECISION) * load_rows(
        grad_w_out + row * K, G * K, count, key, K, SIZE
    ).to(tl.float32)
    by_write += writers
    until, before = t[:, None] <= t[None, :], t[:, None] > t[None, :]
    by_decay = product(tl.where(until, 1.0, 0.0).to(KIND), shares.to(KIND), PRECISION, by_decay)
    by_decay = product(tl.where(before, 1.0, 0.0).to(KIND), (write * writers).to(KIND), PRECISION, by_decay)
    at = (index.to(tl.int64) * G + head) * K + key
    kept = tl.load(across + at, mask=key < K, other=0.0) * tl.load(grad_across + at, mask=key < K, other=0.0)
    store_rows(dlog_decay + row * K, G * K, count, key, by_decay + kept[None, :], K, SIZE)
    store_rows(dq + row * K, G * K, count, key, by_query, K, SIZE)
    if GAINS:
        own = load_rows(writes, w_token, count, key, K, SIZE).to(tl.float32)
        tl.store(dgain + part * tokens * G + row + t * G, tl.sum(own * by_write, 1), mask=t < count)
        by_write *= load_per_token(gain + row, count, G, SIZE)[:, None]
    if VECTOR:
        store_rows(dwrites + row * K, G * K, count, key, by_write, K, SIZE)
    else:
        by_key += by_write
    store_rows(dk + row * K, G * K, count, key, by_key, K, SIZE)
