"""Decays per key inside subtiles of 16 tokens: folded into queries, keys and write vectors, and the backward pass.

Let h be the highest bit in which the positions of two tokens s < t of a subtile differ. Then s lies in the lower and t
in the upper half of an aligned group of 2 h tokens, and the decay from s to t is the product of two factors of at most
1: from s to the middle of the group, and from there to t. One matrix product serves all pairs of a level, and there are
four levels. Exponents are sums of log-decays, computed as products with zeros and ones; they are never differences of
sums, so a strong decay does not cancel the digits of others.

A subtile is the smallest tile of a tensor core and fits the registers of a warp. `vector_decay_tiles` joins subtiles.
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

SUBTILE = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def ones_in_registers(PRECISION: tl.constexpr):
    """Return ones `[SUBTILE, SUBTILE]` computed as a product, so that products can use them from registers."""
    s = tl.arange(0, SUBTILE)
    diagonal = tl.where(s[:, None] == s[None, :], 1.0, 0.0).to(tl.bfloat16)
    return matmul(diagonal, tl.full([SUBTILE, SUBTILE], 1.0, tl.float32).to(tl.bfloat16), PRECISION)


@triton.jit
def split_into_bf16(x, DTYPE: tl.constexpr):
    """Split a float32 tensor into bfloat16 terms: three (exact) for float32 signals, two (16 bits) otherwise."""
    high = x.to(tl.bfloat16)
    left = x - high.to(tl.float32)
    middle = left.to(tl.bfloat16)
    terms = high, middle
    if DTYPE.is_fp32():
        terms += ((left - middle.to(tl.float32)).to(tl.bfloat16),)
    return terms


@triton.jit
def to_middle_mask(level: tl.constexpr):
    """Return the mask `[t, i]` of the log-decays i between token t and the middle of its group of 2^(level + 1)."""
    t = tl.arange(0, SUBTILE)
    upper = ((t >> level) & 1 == 1)[:, None]
    between = tl.where(upper, t[None, :] <= t[:, None], t[None, :] > t[:, None])
    return between & ((t[:, None] ^ t[None, :]) >> level == 0)


@triton.jit
def decay_rows(mask, unit, terms, PRECISION: tl.constexpr):
    """Return the decay `[SUBTILE, keys]` of each token over the log-decays in `mask` `[t, i]`."""
    ones = tl.where(mask, unit, 0.0).to(tl.bfloat16)
    total = matmul(ones, terms[0], PRECISION)
    for i in tl.static_range(1, len(terms)):
        total = matmul(ones, terms[i], PRECISION, total)
    return tl.exp2(total)


@triton.jit
def decay_columns(terms, ones, PRECISION: tl.constexpr):
    """Return the decay of `decay_rows` as `[keys, SUBTILE]`, for a mask of bfloat16 ones and zeros `[t, i]`."""
    total = matmul(terms[0], tl.trans(ones), PRECISION)
    for i in tl.static_range(1, len(terms)):
        total = matmul(terms[i], tl.trans(ones), PRECISION, total)
    return tl.exp2(total)


@triton.jit
def mask_to_bf16(mask):
    return tl.where(mask, 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def locate_subtile(tile_table, length, tiles, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Return the first token of a subtile in the batch, its number of tokens, and its first position in the tile."""
    index = tl.program_id(0) // (SIZE // SUBTILE)
    start = tl.program_id(0) % (SIZE // SUBTILE) * SUBTILE
    token, count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    return token + start, tl.minimum(tl.maximum(count - start, 0), SUBTILE), start


@triton.jit(do_not_specialize=UNSPECIALIZED)
def fold_decays(
    q, k, writes, gain, log_decay, q_in, k_in, w_out, subtile_decays, scores, corrections, tile_table, length, tiles,
    q_token, q_head, k_token, k_head, w_token, w_head, d_token, d_head, G, GROUP, W_GROUP,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, GAINS: tl.constexpr,
    VECTOR: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store q~, k~, w^, S and N of a subtile, and its decay."""
    head = tl.program_id(1)
    token, count, start = locate_subtile(tile_table, length, tiles, SIZE, PACKED)
    DTYPE: tl.constexpr = q_in.dtype.element_ty
    s = tl.arange(0, SUBTILE)
    distance = tl.where(s[:, None] > s[None, :], s[:, None] ^ s[None, :], 0)
    row = token * G + head
    q += token * q_token + head // GROUP * q_head
    k += token * k_token + head // GROUP * k_head
    writes += token * w_token + head // W_GROUP * w_head
    log_decay += token * d_token + head * d_head
    unit = ones_in_registers(PRECISION)
    score = tl.zeros([SUBTILE, SUBTILE], tl.float32)
    correction = tl.zeros([SUBTILE, SUBTILE], tl.float32)
    diagonal = tl.zeros([SUBTILE, BLOCK], tl.float32)
    strength = 1.0
    if GAINS:
        strength = load_per_token(gain + row, count, G, SUBTILE)[:, None]
    for first in range(0, K, BLOCK):
        key = first + tl.arange(0, BLOCK)
        query = load_rows(q, q_token, count, key, K, SUBTILE).to(tl.float32)
        key_rows = query
        if CORRECTS or not VECTOR:
            key_rows = load_rows(k, k_token, count, key, K, SUBTILE).to(tl.float32)
        write = key_rows
        if VECTOR:
            write = load_rows(writes, w_token, count, key, K, SUBTILE).to(tl.float32)
        write *= strength
        each = tl.maximum(load_rows(log_decay, d_token, count, key, K, SUBTILE).to(tl.float32), MIN_LOG_DECAY) * LOG2_E
        terms = split_into_bf16(each, DTYPE)
        diagonal += query * write
        block_score = tl.zeros([SUBTILE, SUBTILE], tl.float32)
        block_correction = tl.zeros([SUBTILE, SUBTILE], tl.float32)
        for level in tl.static_range(num_levels(SUBTILE)):
            decay = decay_rows(to_middle_mask(level), unit, terms, PRECISION)
            decayed_write = tl.trans(write * decay).to(DTYPE)
            block_score = tl.where(
                distance >= 1 << level, matmul((query * decay).to(DTYPE), decayed_write, PRECISION), block_score
            )
            if CORRECTS:
                block_correction = tl.where(
                    distance >= 1 << level,
                    matmul((key_rows * decay).to(DTYPE), decayed_write, PRECISION),
                    block_correction,
                )
        score += block_score
        correction += block_correction
        decay = decay_rows(s[:, None] >= s[None, :], unit, terms, PRECISION)
        at = (tl.program_id(0).to(tl.int64) * G + head) * K + key
        last = (s == SUBTILE - 1)[:, None] & (key < K)[None, :]
        tl.store(subtile_decays + at[None, :] + 0 * s[:, None], decay, mask=last)
        store_rows(q_in + row * K, G * K, count, key, query * decay, K, SUBTILE)
        if CORRECTS:
            store_rows(k_in + row * K, G * K, count, key, key_rows * decay, K, SUBTILE)
        decay = decay_rows(s[:, None] < s[None, :], unit, terms, PRECISION)
        store_rows(w_out + row * K, G * K, count, key, write * decay, K, SUBTILE)
    score = tl.where(s[:, None] == s[None, :], tl.sum(diagonal, 1)[:, None], score)
    store_rows(scores + row * SIZE + start, G * SIZE, count, s, score, SUBTILE, SUBTILE)
    if CORRECTS:
        store_rows(corrections + row * SIZE + start, G * SIZE, count, s, correction, SUBTILE, SUBTILE)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "tokens"])
def unfold_decays(
    q, k, writes, gain, log_decay, grad_q_in, grad_k_in, grad_w_out, common_grad, dscores, dcorrections,
    dq, dk, dwrites, dgain, dlog_decay, tile_table, length, tiles, tokens,
    q_token, q_head, k_token, k_head, w_token, w_head, d_token, d_head, G, GROUP, W_GROUP,
    K: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    GAINS: tl.constexpr, VECTOR: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store gradients of a subtile, for KEYS keys at most, given those of the results of `fold_decays`.

    A log-decay is part of every decay between a token before and a token after it. At each level, a log-decay in an
    upper half gets the products of gradients and queries from its token to the end of the half, one in a lower half the
    products of gradients and writes before its token. `common_grad` is the gradient that all log-decays of the subtile
    share, through the decay of the whole subtile.
    """
    head, part = tl.program_id(1), tl.program_id(2)
    token, count, start = locate_subtile(tile_table, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    DTYPE: tl.constexpr = grad_q_in.dtype.element_ty
    s = tl.arange(0, SUBTILE)
    row = token * G + head
    distance = s[:, None] ^ s[None, :]
    q += token * q_token + head // GROUP * q_head
    k += token * k_token + head // GROUP * k_head
    writes += token * w_token + head // W_GROUP * w_head
    log_decay += token * d_token + head * d_head
    scores, corrections_at = dscores + row * SIZE + start, dcorrections + row * SIZE + start
    score = load_rows(scores, G * SIZE, count, s, SUBTILE, SUBTILE)
    score_pairs, correction_pairs, level_ones = (), (), ()
    correction = score
    if CORRECTS:
        correction = load_rows(corrections_at, G * SIZE, count, s, SUBTILE, SUBTILE)
    for level in tl.static_range(num_levels(SUBTILE)):
        score_pairs += (tl.where(distance >> level == 1, score, 0.0),)
        correction_pairs += (tl.where(distance >> level == 1, correction, 0.0),)
        level_ones += (mask_to_bf16(to_middle_mask(level)),)
    before, after = mask_to_bf16(s[:, None] >= s[None, :]), mask_to_bf16(s[:, None] < s[None, :])
    diagonal = tl.load(scores + s * (G * SIZE + 1), mask=s < count, other=0.0).to(tl.float32)[None, :]
    strength = 1.0
    if GAINS:
        strength = load_per_token(gain + row, count, G, SUBTILE)[None, :]
    gain_products = tl.zeros([BLOCK, SUBTILE], tl.float32)
    for first in range(0, KEYS if KEYS < K else K, BLOCK):
        key = part * KEYS + first + tl.arange(0, BLOCK)
        query = load_rows_transposed(q, q_token, count, key, K, SUBTILE).to(tl.float32)
        key_rows = query
        if CORRECTS or not VECTOR:
            key_rows = load_rows_transposed(k, k_token, count, key, K, SUBTILE).to(tl.float32)
        plain_write = key_rows
        if VECTOR:
            plain_write = load_rows_transposed(writes, w_token, count, key, K, SUBTILE).to(tl.float32)
        write = plain_write * strength
        each = load_rows_transposed(log_decay, d_token, count, key, K, SUBTILE).to(tl.float32)
        terms = split_into_bf16(tl.maximum(each, MIN_LOG_DECAY) * LOG2_E, DTYPE)
        decay = decay_columns(terms, before, PRECISION)
        read_grads = decay * load_rows_transposed(grad_q_in + row * K, G * K, count, key, K, SUBTILE).to(tl.float32)
        grad_query = read_grads + diagonal * write
        products = query * read_grads
        grad_key = tl.zeros([BLOCK, SUBTILE], tl.float32)
        if CORRECTS:
            grad_key = decay * load_rows_transposed(grad_k_in + row * K, G * K, count, key, K, SUBTILE).to(tl.float32)
            products += key_rows * grad_key
        grad_decay = matmul(products.to(DTYPE), before.to(DTYPE), PRECISION)
        decay = decay_columns(terms, after, PRECISION)
        write_grads = decay * load_rows_transposed(grad_w_out + row * K, G * K, count, key, K, SUBTILE).to(tl.float32)
        grad_write = write_grads + diagonal * query
        grad_decay = matmul((write * write_grads).to(DTYPE), after.to(DTYPE), PRECISION, grad_decay)
        for level in tl.static_range(num_levels(SUBTILE)):
            decay = decay_columns(terms, level_ones[level], PRECISION)
            decayed_writes, decayed_reads = write * decay, query * decay
            read_grads = matmul(decayed_writes.to(DTYPE), tl.trans(score_pairs[level]), PRECISION)
            grad_query += read_grads * decay
            products = decayed_reads * read_grads
            write_grads = matmul(decayed_reads.to(DTYPE), score_pairs[level], PRECISION)
            if CORRECTS:
                decayed_reads = key_rows * decay
                read_grads = matmul(decayed_writes.to(DTYPE), tl.trans(correction_pairs[level]), PRECISION)
                grad_key += read_grads * decay
                products += decayed_reads * read_grads
                write_grads = matmul(decayed_reads.to(DTYPE), correction_pairs[level], PRECISION, write_grads)
            grad_write += write_grads * decay
            products += decayed_writes * write_grads
            grad_decay = matmul(products.to(DTYPE), level_ones[level].to(DTYPE), PRECISION, grad_decay)
        at = (tl.program_id(0).to(tl.int64) * G + head) * K + key
        grad_decay += tl.load(common_grad + at, mask=key < K, other=0.0)[:, None]
        store_columns(dlog_decay + row * K, G * K, count, key, grad_decay, K, SUBTILE)
        store_columns(dq + row * K, G * K, count, key, grad_query, K, SUBTILE)
        if GAINS:
            gain_products += plain_write * grad_write
            grad_write *= strength
        if VECTOR:
            store_columns(dwrites + row * K, G * K, count, key, grad_write, K, SUBTILE)
        else:
            grad_key += grad_write
        store_columns(dk + row * K, G * K, count, key, grad_key, K, SUBTILE)
    if GAINS:
        tl.store(dgain + part * tokens * G + row + s * G, tl.sum(gain_products, 0), mask=s < count)


@triton.jit
def store_columns(base, stride, count, column, x, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    t = tl.arange(0, SIZE)
    mask = (t < count)[None, :] & (column < WIDTH)[:, None]
    tl.store(base + t[None, :] * stride + column[:, None], x.to(base.dtype.element_ty), mask=mask)
