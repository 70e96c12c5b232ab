"""Decays per key inside subtiles of 16 tokens: folded into queries, keys and write vectors.

Let h be the highest bit in which the positions of two tokens s < t of a subtile differ. Then s lies in the lower and t
in the upper half of an aligned group of 2 h tokens, and the decay from s to t is the product of two factors of at most
1: from s to the middle of the group, and from there to t. One matrix product serves all pairs of a level, and there are
four levels. Exponents are sums of log-decays, computed as products with zeros and ones; they are never differences of
sums, so a strong decay does not cancel the digits of others.

A subtile is the smallest tile of a tensor core and fits the registers of a warp. `vector_decay_tiles` joins
subtiles, `vector_decay_backward` computes gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._linear_memory import scratch
from kalmix.ops._linear_memory.triton.forward_kernels import unit_lower_inverse
from kalmix.ops._shared.triton.decay_products import MIN_LOG_DECAY
from kalmix.ops._shared.triton.tiles import (
    UNSPECIALIZED,
    load_per_token,
    load_rows,
    locate_tile,
    matmul,
    num_levels,
    store_rows,
)

SUBTILE = tl.constexpr(scratch.SUBTILE)
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
    """Store q~, k~, w^, S and (I + N)^-1 of a subtile, and its decay.

    The inverse is in place of N: products of 16 rows cost much less here than in `solve_errors`, where all have SIZE.
    """
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
        inverse = unit_lower_inverse(correction, SUBTILE, PRECISION)
        store_rows(corrections + row * SIZE + start, G * SIZE, count, s, inverse, SUBTILE, SUBTILE)


@triton.jit
def load_edge_decays(subtile_decays, stride, subtile, key, K: tl.constexpr, SUBTILES: tl.constexpr):
    """Return the decays `[keys]` over the subtiles of a tile before a subtile, and over those after it."""
    to_start, to_end = tl.full(key.shape, 1.0, tl.float32), tl.full(key.shape, 1.0, tl.float32)
    for j in tl.static_range(SUBTILES - 1):
        to_start *= tl.load(subtile_decays + j * stride + key, mask=(key < K) & (j < subtile), other=1.0)
    for j in tl.static_range(SUBTILES - 1):
        later = SUBTILES - 1 - j
        to_end *= tl.load(subtile_decays + later * stride + key, mask=(key < K) & (later > subtile), other=1.0)
    return to_start, to_end
