"""Decays per key: folded into queries, keys and write vectors of pieces of 16 tokens, and unfolded after.

Two tokens s < t of a piece differ in a highest bit h of their places, and lie in the lower and the upper half of a
block of 2 h. The decay between them splits where the halves meet into two factors, each at most 1, of one token and one
key: so a matrix product gives all pairs of a level, and there are four levels. Exponents are sums of log-decays, never
differences of such sums, so no decay loses the digits of another; products with ones and zeros take them.

Pieces are as small as tensor cores multiply, and one warp holds one in registers. `triton_pieces` joins them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.decay_products import MIN_LOG_DECAY
from kalmix.ops._shared.triton.tiles import (
    UNSPECIALIZED,
    load_per_token,
    load_rows,
    load_rows_transposed,
    locate_tile,
    matmul,
    num_levels,
    store_rows,
)

PIECE = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def ones_in_registers(PRECISION: tl.constexpr):
    """Ones `[PIECE, PIECE]` as a product: what is chosen from it is a factor of products without leaving registers."""
    s = tl.arange(0, PIECE)
    same = tl.where(s[:, None] == s[None, :], 1.0, 0.0).to(tl.bfloat16)
    return matmul(same, tl.full([PIECE, PIECE], 1.0, tl.float32).to(tl.bfloat16), PRECISION)


@triton.jit
def parts_of(x, KIND: tl.constexpr):
    """A float32 tensor as a sum of bfloat16: of three to the last bit; beside half precision, of two to 16 bits."""
    high = x.to(tl.bfloat16)
    left = x - high.to(tl.float32)
    middle = left.to(tl.bfloat16)
    parts = high, middle
    if KIND.is_fp32():
        parts += ((left - middle.to(tl.float32)).to(tl.bfloat16),)
    return parts


@triton.jit
def halfway(level: tl.constexpr):
    """Whose log-decays lie between token t and where the halves of its block of 2^(level + 1) meet, `[t, i]`."""
    t = tl.arange(0, PIECE)
    upper = ((t >> level) & 1 == 1)[:, None]
    reach = tl.where(upper, t[None, :] <= t[:, None], t[None, :] > t[:, None])
    return reach & ((t[:, None] ^ t[None, :]) >> level == 0)


@triton.jit
def decay_down(mask, unit, parts, PRECISION: tl.constexpr):
    """The decay of each token over those that `mask` `[t, i]` names, `[PIECE, keys]`."""
    ones = tl.where(mask, unit, 0.0).to(tl.bfloat16)
    total = matmul(ones, parts[0], PRECISION)
    for i in tl.static_range(1, len(parts)):
        total = matmul(ones, parts[i], PRECISION, total)
    return tl.exp2(total)


@triton.jit
def decay_along(parts, ones, PRECISION: tl.constexpr):
    """The same, `[keys, PIECE]`, of ones and zeros `[t, i]`."""
    total = matmul(parts[0], tl.trans(ones), PRECISION)
    for i in tl.static_range(1, len(parts)):
        total = matmul(parts[i], tl.trans(ones), PRECISION, total)
    return tl.exp2(total)


@triton.jit
def ones_where(mask):
    return tl.where(mask, 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def piece_of(table, length, tiles, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """A piece's first token in the batch, its tokens, and its place in the tile, which is its column of scores."""
    index = tl.program_id(0) // (SIZE // PIECE)
    start = tl.program_id(0) % (SIZE // PIECE) * PIECE
    token, count = locate_tile(table, index, length, tiles, SIZE, PACKED)
    return token + start, tl.minimum(tl.maximum(count - start, 0), PIECE), start


@triton.jit(do_not_specialize=UNSPECIALIZED)
def fold(
    q, k, writes, gain, log_decay, q_in, k_in, w_out, paths, scores, corrections, table, length, tiles,
    q_token, q_head, k_token, k_head, w_token, w_head, d_token, d_head, G, SHARE, W_SHARE,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, GAINS: tl.constexpr,
    CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q~, k~, w^, S and N of a piece, and the decay across it."""
    head = tl.program_id(1)
    token, count, start = piece_of(table, length, tiles, SIZE, PACKED)
    KIND: tl.constexpr = q_in.dtype.element_ty
    s = tl.arange(0, PIECE)
    near = tl.where(s[:, None] > s[None, :], s[:, None] ^ s[None, :], 0)
    row = token * G + head
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    writes += token * w_token + head // W_SHARE * w_head
    log_decay += token * d_token + head * d_head
    unit = ones_in_registers(PRECISION)
    score = tl.zeros([PIECE, PIECE], tl.float32)
    correction = tl.zeros([PIECE, PIECE], tl.float32)
    for first in range(0, K, BLOCK):
        key = first + tl.arange(0, BLOCK)
        query = load_rows(q, q_token, count, key, K, PIECE).to(tl.float32)
        known = load_rows(k, k_token, count, key, K, PIECE).to(tl.float32)
        write = load_rows(writes, w_token, count, key, K, PIECE).to(tl.float32)
        if GAINS:
            write *= load_per_token(gain + row, count, G, PIECE)[:, None]
        each = tl.maximum(load_rows(log_decay, d_token, count, key, K, PIECE).to(tl.float32), MIN_LOG_DECAY) * LOG2_E
        parts = parts_of(each, KIND)
        asked = tl.where(s[:, None] == s[None, :], tl.sum(query * write, 1)[:, None], 0.0)
        fixed = tl.zeros([PIECE, PIECE], tl.float32)
        for level in tl.static_range(num_levels(PIECE)):
            fade = decay_down(halfway(level), unit, parts, PRECISION)
            faded = tl.trans((write * fade).to(KIND))
            asked = tl.where(near >= 1 << level, matmul((query * fade).to(KIND), faded, PRECISION), asked)
            if CORRECTS:
                fixed = tl.where(near >= 1 << level, matmul((known * fade).to(KIND), faded, PRECISION), fixed)
        score += asked
        correction += fixed
        at = (tl.program_id(0).to(tl.int64) * G + head) * K + key
        tl.store(paths + at, tl.exp2(tl.sum(each, 0)), mask=key < K)
        fade = decay_down(s[:, None] >= s[None, :], unit, parts, PRECISION)
        store_rows(q_in + row * K, G * K, count, key, query * fade, K, PIECE)
        if CORRECTS:
            store_rows(k_in + row * K, G * K, count, key, known * fade, K, PIECE)
        fade = decay_down(s[:, None] < s[None, :], unit, parts, PRECISION)
        store_rows(w_out + row * K, G * K, count, key, write * fade, K, PIECE)
    store_rows(scores + row * SIZE + start, G * SIZE, count, s, score, PIECE, PIECE)
    if CORRECTS:
        store_rows(corrections + row * SIZE + start, G * SIZE, count, s, correction, PIECE, PIECE)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "tokens"])
def unfold(
    q, k, writes, gain, log_decay, grad_q_in, grad_k_in, grad_w_out, shared, dscores, dcorrections,
    dq, dk, dwrites, dgain, dlog_decay, table, length, tiles, tokens,
    q_token, q_head, k_token, k_head, w_token, w_head, d_token, d_head, G, SHARE, W_SHARE,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, GAINS: tl.constexpr,
    VECTOR: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a piece, some columns, from those of what it was folded into.

    A log-decay is in every decay from before it to after it. Of a level, it gets the readers' shares of the tokens from
    it to the end of its half if that is the upper one, the writers' of those before it if the lower; `shared` is what
    all log-decays of the piece get alike, from decays across it.
    """
    head, part = tl.program_id(1), tl.program_id(2)
    token, count, start = piece_of(table, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = grad_q_in.dtype.element_ty
    key, s = part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PIECE)
    row = token * G + head
    near = s[:, None] ^ s[None, :]
    writes += token * w_token + head // W_SHARE * w_head
    query = load_rows_transposed(q + token * q_token + head // SHARE * q_head, q_token, count, key, K, PIECE).to(
        tl.float32
    )
    known = load_rows_transposed(k + token * k_token + head // SHARE * k_head, k_token, count, key, K, PIECE).to(
        tl.float32
    )
    write = load_rows_transposed(writes, w_token, count, key, K, PIECE).to(tl.float32)
    if GAINS:
        write *= load_per_token(gain + row, count, G, PIECE)[None, :]
    each = load_rows_transposed(log_decay + token * d_token + head * d_head, d_token, count, key, K, PIECE).to(
        tl.float32
    )
    parts = parts_of(tl.maximum(each, MIN_LOG_DECAY) * LOG2_E, KIND)
    scores, fixes = dscores + row * SIZE + start, dcorrections + row * SIZE + start
    asked = load_rows(scores, G * SIZE, count, s, PIECE, PIECE)
    fixed = asked
    if CORRECTS:
        fixed = load_rows(fixes, G * SIZE, count, s, PIECE, PIECE)
    ones = ones_where(s[:, None] >= s[None, :])
    fade = decay_along(parts, ones, PRECISION)
    readers = fade * load_rows_transposed(grad_q_in + row * K, G * K, count, key, K, PIECE).to(tl.float32)
    same = tl.load(scores + s * (G * SIZE + 1), mask=s < count, other=0.0).to(tl.float32)[None, :]
    by_query = readers + same * write
    shares = query * readers
    by_key = tl.zeros([BLOCK, PIECE], tl.float32)
    if CORRECTS:
        by_key = fade * load_rows_transposed(grad_k_in + row * K, G * K, count, key, K, PIECE).to(tl.float32)
        shares += known * by_key
    by_decay = matmul(shares.to(KIND), ones.to(KIND), PRECISION)
    ones = ones_where(s[:, None] < s[None, :])
    fade = decay_along(parts, ones, PRECISION)
    writers = fade * load_rows_transposed(grad_w_out + row * K, G * K, count, key, K, PIECE).to(tl.float32)
    by_write = writers + same * query
    by_decay = matmul((write * writers).to(KIND), ones.to(KIND), PRECISION, by_decay)
    for level in tl.static_range(num_levels(PIECE)):
        ones = ones_where(halfway(level))
        fade = decay_along(parts, ones, PRECISION)
        wrote, reads = write * fade, query * fade
        facing = tl.where(near >> level == 1, asked, 0.0)
        readers = matmul(wrote.to(KIND), tl.trans(facing), PRECISION)
        by_query += readers * fade
        shares = reads * readers
        writers = matmul(reads.to(KIND), facing, PRECISION)
        if CORRECTS:
            reads = known * fade
            facing = tl.where(near >> level == 1, fixed, 0.0)
            readers = matmul(wrote.to(KIND), tl.trans(facing), PRECISION)
            by_key += readers * fade
            shares += reads * readers
            writers = matmul(reads.to(KIND), facing, PRECISION, writers)
        by_write += writers * fade
        shares += wrote * writers
        by_decay = matmul(shares.to(KIND), ones.to(KIND), PRECISION, by_decay)
    at = (tl.program_id(0).to(tl.int64) * G + head) * K + key
    by_decay += tl.load(shared + at, mask=key < K, other=0.0)[:, None]
    store_columns(dlog_decay + row * K, G * K, count, key, by_decay, K, PIECE)
    store_columns(dq + row * K, G * K, count, key, by_query, K, PIECE)
    if GAINS:
        own = load_rows_transposed(writes, w_token, count, key, K, PIECE).to(tl.float32)
        tl.store(dgain + part * tokens * G + row + s * G, tl.sum(own * by_write, 0), mask=s < count)
        by_write *= load_per_token(gain + row, count, G, PIECE)[None, :]
    if VECTOR:
        store_columns(dwrites + row * K, G * K, count, key, by_write, K, PIECE)
    else:
        by_key += by_write
    store_columns(dk + row * K, G * K, count, key, by_key, K, PIECE)


@triton.jit
def store_columns(base, stride, count, column, x, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    t = tl.arange(0, SIZE)
    mask = (t < count)[None, :] & (column < WIDTH)[:, None]
    tl.store(base + t[None, :] * stride + column[:, None], x.to(base.dtype.element_ty), mask=mask)
