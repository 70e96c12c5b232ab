"""Gradients of signals with decays per key, given those of tiles: between subtiles, and inside them.

See `vector_decay` and `vector_decay_tiles` for the factors of decays. A program computes the gradients of one subtile;
blocks have keys as rows and tokens as columns. Pairs of tokens in different subtiles are "near" if both are in the
subtiles 2 i and 2 i + 1, and "far" if they are on either side of the middle of four subtiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._linear_memory.triton.vector_decay import (
    LOG2_E,
    SUBTILE,
    load_edge_decays,
    split_into_bf16,
    to_middle_mask,
)
from kalmix.ops._linear_memory.triton.vector_decay_pairs import (
    GROUP_KEYS,
    MODERATE_DECAY,
    gradients_by_level,
    gradients_for_moderate_decays,
    mask_to_bf16,
)
from kalmix.ops._shared.triton.decay_products import MIN_LOG_DECAY
from kalmix.ops._shared.triton.tiles import (
    UNSPECIALIZED,
    load_per_token,
    load_rows,
    load_rows_transposed,
    locate_tile,
    matmul,
    num_levels,
)


@triton.jit
def load_read_pairs(pairs, stride, subtile, count, FIRST: tl.constexpr):
    """Load gradients of pairs `[s, t]`, t in a subtile and s in FIRST tokens from that of `pairs`."""
    s = tl.arange(0, FIRST)
    return load_rows_transposed(pairs + subtile * SUBTILE * stride, stride, count, s, FIRST, SUBTILE)


@triton.jit
def load_written_pairs(pairs, stride, subtile, count, LAST: tl.constexpr):
    """Load gradients of pairs `[t, s]`, s in a subtile and t in LAST tokens, of which `count` exist."""
    return load_rows(pairs + subtile * SUBTILE, stride, count, tl.arange(0, SUBTILE), SUBTILE, LAST)


@triton.jit
def near_read_gradients(
    grad_query, grad_key, w, dscores, dcorrections, subtile, count, key, G,
    K: tl.constexpr, SIZE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add gradients of queries and keys of a subtile through their pairs with writes of the subtile before it."""
    before = (subtile - 1) * SUBTILE
    write = load_rows_transposed(w + before * G * K, G * K, SUBTILE, key, K, SUBTILE)
    score = load_read_pairs(dscores + before, G * SIZE, subtile, count, SUBTILE)
    grad_query = matmul(write, score, PRECISION, grad_query)
    if CORRECTS:
        correction = load_read_pairs(dcorrections + before, G * SIZE, subtile, count, SUBTILE)
        grad_key = matmul(write, correction, PRECISION, grad_key)
    return grad_query, grad_key


@triton.jit
def near_write_gradients(
    grad_write, q, k, dscores, dcorrections, subtile, tile_count, key, G,
    K: tl.constexpr, SIZE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add gradients of writes of a subtile through their pairs with queries and keys of the next subtile."""
    after = (subtile + 1) * SUBTILE
    count = tile_count - after
    query = load_rows_transposed(q + after * G * K, G * K, count, key, K, SUBTILE)
    score = load_written_pairs(dscores + after * G * SIZE, G * SIZE, subtile, count, SUBTILE)
    grad_write = matmul(query, score, PRECISION, grad_write)
    if CORRECTS:
        key_rows = load_rows_transposed(k + after * G * K, G * K, count, key, K, SUBTILE)
        correction = load_written_pairs(dcorrections + after * G * SIZE, G * SIZE, subtile, count, SUBTILE)
        grad_write = matmul(key_rows, correction, PRECISION, grad_write)
    return grad_write


@triton.jit
def far_read_gradients(
    grad_query, grad_key, shared_grad, q, k, w, second, third, dscores, dcorrections, subtile, tile_count, key, G,
    K: tl.constexpr, SIZE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add gradients of queries and keys of the subtiles 2 and 3 through their pairs with writes of the first half.

    `second` and `third` are the decays over the subtiles 1 and 2. In the program of subtile 2, also add the gradient of
    the log-decay over this subtile, through queries and keys of subtile 3, to `shared_grad`.
    """
    DTYPE: tl.constexpr = w.dtype.element_ty
    HALF: tl.constexpr = 2 * SUBTILE
    last = 3 * SUBTILE
    in_first = (tl.arange(0, HALF) < SUBTILE)[None, :]
    write = load_rows_transposed(w, G * K, HALF, key, K, HALF)
    write = (write * tl.where(in_first, second, 1.0)).to(DTYPE)
    to_middle = tl.where(subtile == 3, third, 1.0)
    score = load_read_pairs(dscores, G * SIZE, subtile, tile_count - subtile * SUBTILE, HALF)
    grad_query += to_middle * matmul(write, score, PRECISION)
    if CORRECTS:
        correction = load_read_pairs(dcorrections, G * SIZE, subtile, tile_count - subtile * SUBTILE, HALF)
        grad_key += to_middle * matmul(write, correction, PRECISION)
    if subtile == 2:
        count = tile_count - last
        last_score = load_read_pairs(dscores, G * SIZE, 3, count, HALF)
        query = load_rows_transposed(q + last * G * K, G * K, count, key, K, SUBTILE)
        products = query * matmul(write, last_score, PRECISION)
        if CORRECTS:
            last_correction = load_read_pairs(dcorrections, G * SIZE, 3, count, HALF)
            key_rows = load_rows_transposed(k + last * G * K, G * K, count, key, K, SUBTILE)
            products += key_rows * matmul(write, last_correction, PRECISION)
        shared_grad += tl.sum(products * third, 1)
    return grad_query, grad_key, shared_grad


@triton.jit
def far_write_gradients(
    grad_write, shared_grad, q, k, w, second, third, dscores, dcorrections, subtile, tile_count, key, G,
    K: tl.constexpr, SIZE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add gradients of writes of the subtiles 0 and 1 through their pairs with queries and keys of the second half.

    In the program of subtile 1, also add the gradient of the log-decay over this subtile, through writes of subtile 0,
    to `shared_grad`.
    """
    DTYPE: tl.constexpr = w.dtype.element_ty
    HALF: tl.constexpr = 2 * SUBTILE
    count, at, pairs = tile_count - HALF, HALF * G * K, HALF * G * SIZE
    decay = tl.where((tl.arange(0, HALF) < SUBTILE)[None, :], 1.0, third)
    query = (load_rows_transposed(q + at, G * K, count, key, K, HALF) * decay).to(DTYPE)
    score = load_written_pairs(dscores + pairs, G * SIZE, subtile, count, HALF)
    write_grads = matmul(query, score, PRECISION)
    key_rows = query
    if CORRECTS:
        key_rows = (load_rows_transposed(k + at, G * K, count, key, K, HALF) * decay).to(DTYPE)
        correction = load_written_pairs(dcorrections + pairs, G * SIZE, subtile, count, HALF)
        write_grads = matmul(key_rows, correction, PRECISION, write_grads)
    grad_write += tl.where(subtile == 0, second, 1.0) * write_grads
    if subtile == 1:
        first_score = load_written_pairs(dscores + pairs, G * SIZE, 0, count, HALF)
        first_grads = matmul(query, first_score, PRECISION)
        if CORRECTS:
            first_correction = load_written_pairs(dcorrections + pairs, G * SIZE, 0, count, HALF)
            first_grads = matmul(key_rows, first_correction, PRECISION, first_grads)
        write = load_rows_transposed(w, G * K, SUBTILE, key, K, SUBTILE)
        shared_grad += tl.sum(write * first_grads * second, 1)
    return grad_write, shared_grad


@triton.jit
def subtile_gradients(
    grad_query, grad_key, grad_write, shared_grad, q, k, w, subtile_decays, dscores, dcorrections, subtile, tile_count,
    key, G, K: tl.constexpr, SIZE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return gradients `[keys, SUBTILE]` of the results of `fold_decays`, given those of q~, k~ and w^ of the tile.

    Pointers are at the first token of the tile; q, k and w have the decays of subtiles folded in. Add to `shared_grad`
    `[keys]` the gradients of decays over the whole subtile between tokens before it and tokens after it.
    """
    SUBTILES: tl.constexpr = SIZE // SUBTILE
    to_start, to_end = load_edge_decays(subtile_decays, G * K, subtile, key, K, SUBTILES)
    grad_query *= to_start[:, None]
    grad_key *= to_start[:, None]
    grad_write *= to_end[:, None]
    if subtile % 2 == 1:
        grad_query, grad_key = near_read_gradients(
            grad_query, grad_key, w, dscores, dcorrections, subtile, tile_count - subtile * SUBTILE, key, G,
            K, SIZE, CORRECTS, PRECISION,
        )  # fmt: skip
    else:
        grad_write = near_write_gradients(
            grad_write, q, k, dscores, dcorrections, subtile, tile_count, key, G, K, SIZE, CORRECTS, PRECISION
        )
    if SUBTILES == 4:
        second = tl.load(subtile_decays + G * K + key, mask=key < K, other=0.0)[:, None]
        third = tl.load(subtile_decays + 2 * G * K + key, mask=key < K, other=0.0)[:, None]
        if subtile >= 2:
            grad_query, grad_key, shared_grad = far_read_gradients(
                grad_query, grad_key, shared_grad, q, k, w, second, third, dscores, dcorrections, subtile, tile_count,
                key, G, K, SIZE, CORRECTS, PRECISION,
            )  # fmt: skip
        else:
            grad_write, shared_grad = far_write_gradients(
                grad_write, shared_grad, q, k, w, second, third, dscores, dcorrections, subtile, tile_count, key, G,
                K, SIZE, CORRECTS, PRECISION,
            )  # fmt: skip
    return grad_query, grad_key, grad_write, shared_grad


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "tokens"])
def unfold_decays(
    q, k, writes, gain, log_decay, subtile_q, subtile_k, subtile_w, subtile_decays,
    grad_q_in, grad_k_in, grad_w_out, common_grad, dscores, dcorrections,
    dq, dk, dwrites, dgain, dlog_decay, tile_table, length, tiles, tokens,
    q_token, q_head, k_token, k_head, w_token, w_head, d_token, d_head, G, GROUP, W_GROUP,
    K: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, GAIN_SUMS: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, GAINS: tl.constexpr, VECTOR: tl.constexpr, CORRECTS: tl.constexpr, DECAY_KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store gradients of a subtile, for KEYS keys at most, given those of q~, k~ and w^ of its tile, S and N.

    First compute the gradients of the results of `fold_decays`: through q~, k~ and w^ of the tile, and through near and
    far pairs of tokens. `common_grad` is the gradient that all log-decays of the subtile share, through the decay of
    the whole subtile; the gradients of pairs on either side of the subtile are added to it.

    DECAY_KIND is "any", or the kind of decays that the program handles: "moderate" if the decay over the subtile is at
    least `MODERATE_DECAY` for all keys of its group of GROUP_KEYS, otherwise "strong". It stores nothing if its decays
    are of the other kind. Two kernels take fewer registers for the common kind than one with a branch.

    Programs of neighbouring keys run at the same time, because they read neighbouring parts of the same rows. GAIN_SUMS
    is the number of partial gradients of gains for KEYS keys; all but the first are zeros.
    """
    BLOCKS: tl.constexpr = (K + KEYS - 1) // KEYS
    SUBTILES: tl.constexpr = SIZE // SUBTILE
    position, block, head = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    index, subtile = (position // SUBTILES).to(tl.int64), position % SUBTILES
    token, tile_count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    start = subtile * SUBTILE
    count = tl.minimum(tile_count - start, SUBTILE)
    if count <= 0:
        return
    at_decays = (position.to(tl.int64) * G + head) * K
    if DECAY_KIND != "any":
        tl.static_assert(GROUP_KEYS % KEYS == 0, "the keys of a program must belong to one group")
        group = block * KEYS // GROUP_KEYS * GROUP_KEYS + tl.arange(0, GROUP_KEYS)
        smallest = tl.min(tl.load(subtile_decays + at_decays + group, mask=group < K, other=1.0), 0)
        if (smallest >= MODERATE_DECAY) != (DECAY_KIND == "moderate"):
            return
    DTYPE: tl.constexpr = grad_q_in.dtype.element_ty
    tile_row = token * G + head
    token += start
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
    if DECAY_KIND == "moderate":
        score = tl.where(s[:, None] > s[None, :], score, 0.0)
    else:
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
        key = block * KEYS + first + tl.arange(0, BLOCK)
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
        shared_grad = tl.load(common_grad + at_decays + key, mask=key < K, other=0.0)
        grad_in = load_rows_transposed(grad_q_in + row * K, G * K, count, key, K, SUBTILE).to(tl.float32)
        grad_key_in = grad_in
        if CORRECTS:
            grad_key_in = load_rows_transposed(grad_k_in + row * K, G * K, count, key, K, SUBTILE).to(tl.float32)
        grad_out = load_rows_transposed(grad_w_out + row * K, G * K, count, key, K, SUBTILE).to(tl.float32)
        if SUBTILES > 1:
            grad_in, grad_key_in, grad_out, shared_grad = subtile_gradients(
                grad_in, grad_key_in, grad_out, shared_grad, subtile_q + tile_row * K, subtile_k + tile_row * K,
                subtile_w + tile_row * K, subtile_decays + (index * SUBTILES * G + head) * K,
                dscores + tile_row * SIZE, dcorrections + tile_row * SIZE, subtile, tile_count, key, G,
                K, SIZE, CORRECTS, PRECISION,
            )  # fmt: skip
        if DECAY_KIND == "moderate":
            edge_decay = tl.sqrt(tl.load(subtile_decays + at_decays + key, mask=key < K, other=1.0))
            grad_query, grad_key, grad_write, grad_decay = gradients_for_moderate_decays(
                query, key_rows, write, terms, grad_in, grad_key_in, grad_out, diagonal, score, correction,
                edge_decay, before, after, DTYPE, CORRECTS, PRECISION,
            )  # fmt: skip
        else:
            grad_query, grad_key, grad_write, grad_decay = gradients_by_level(
                query, key_rows, write, terms, grad_in, grad_key_in, grad_out, diagonal, score_pairs, correction_pairs,
                level_ones, before, after, DTYPE, CORRECTS, PRECISION,
            )  # fmt: skip
        grad_decay += shared_grad[:, None]
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
        at = dgain + block * GAIN_SUMS * tokens * G + row + s * G
        tl.store(at, tl.sum(gain_products, 0), mask=s < count)
        for i in tl.static_range(1, GAIN_SUMS):
            exists = block * KEYS + i * (KEYS // GAIN_SUMS) < K
            tl.store(at + i * tokens * G, tl.zeros([SUBTILE], tl.float32), mask=(s < count) & exists)


@triton.jit
def store_columns(base, stride, count, column, x, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    t = tl.arange(0, SIZE)
    mask = (t < count)[None, :] & (column < WIDTH)[:, None]
    tl.store(base + t[None, :] * stride + column[:, None], x.to(base.dtype.element_ty), mask=mask)
