"""Decays per key: folded into queries, keys and write vectors before a memory is filtered, and unfolded after.

A decay from token s to token t of a tile splits where a block of 16 tokens begins, and each factor is at most 1: that
is the reference point of blocks apart from each other, whose products are then matrix products; inside a block there is
none, and pairs are taken one by one. Every exponent is a sum of log-decays, never a difference of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.kernels.primitives.triton_tiles import (
    LOOSE,
    load_columns,
    load_per_token,
    load_rows,
    product,
    store_rows,
    tile_of,
)


@triton.jit
def block_decays(log_decay, stride, count, start, key, K: tl.constexpr):
    """Log-decays of a block's tokens `[16, keys]`: since its start, until its end, and in all `[keys]`."""
    log_decay += start * stride
    each = load_rows(log_decay, stride, count - start, key, K, 16).to(tl.float32)
    rest = load_rows(log_decay + stride, stride, tl.minimum(count - start, 16) - 1, key, K, 16).to(tl.float32)
    return tl.cumsum(each, 0), tl.cumsum(rest, 0, reverse=True), tl.sum(each, 0)


@triton.jit
def block_writes(writes, stride, gain, G, count, start, key, K: tl.constexpr, GAINS: tl.constexpr):
    """Write vectors of a block, times their gains, float32 `[16, keys]`."""
    write = load_rows(writes + start * stride, stride, count - start, key, K, 16).to(tl.float32)
    if GAINS:
        write *= load_per_token(gain + start * G, count - start, G, 16)[:, None]
    return write


@triton.jit(do_not_specialize=LOOSE)
def fold(
    q, k, writes, gain, log_decay, q_in, k_in, w_out, across, scores, corrections, table, length, tiles,
    q_token, q_head, k_token, k_head, w_token, w_head, d_token, d_head, G, SHARE, W_SHARE,
    K: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, GAINS: tl.constexpr,
    CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one block: q~, k~, w^, and its rows of S and N."""
    index, head, own = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    start = own * 16
    if start >= count:
        return
    KIND: tl.constexpr = q_in.dtype.element_ty
    key, r = tl.arange(0, WIDTH), tl.arange(0, 16)
    row = token * G + head
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    writes += token * w_token + head // W_SHARE * w_head
    log_decay += token * d_token + head * d_head
    gain += row
    scores += (row + start * G) * SIZE
    corrections += (row + start * G) * SIZE
    left = count - start
    since, rest, total = block_decays(log_decay, d_token, count, start, key, K)
    query = load_rows(q + start * q_token, q_token, left, key, K, 16).to(tl.float32)
    known = load_rows(k + start * k_token, k_token, left, key, K, 16).to(tl.float32)
    faded_query, faded_known = (query * tl.exp(since)).to(KIND), (known * tl.exp(since)).to(KIND)

    before = tl.zeros([WIDTH], tl.float32)
    for back in range(own):
        other = (own - 1 - back) * 16
        _since, until, over = block_decays(log_decay, d_token, count, other, key, K)
        write = block_writes(writes, w_token, gain, G, count, other, key, K, GAINS)
        write = (write * tl.exp(until + before[None, :])).to(KIND)
        score = product(faded_query, tl.trans(write), PRECISION)
        store_rows(scores + other, G * SIZE, left, r, score, 16, 16)
        if CORRECTS:
            correction = product(faded_known, tl.trans(write), PRECISION)
            store_rows(corrections + other, G * SIZE, left, r, correction, 16, 16)
        before += over
    store_rows(q_in + (row + start * G) * K, G * K, left, key, query * tl.exp(since + before[None, :]), K, 16)
    if CORRECTS:
        store_rows(k_in + (row + start * G) * K, G * K, left, key, known * tl.exp(since + before[None, :]), K, 16)

    after = tl.zeros([WIDTH], tl.float32)
    for other in range(start + 16, SIZE, 16):
        after += tl.sum(load_rows(log_decay + other * d_token, d_token, count - other, key, K, 16).to(tl.float32), 0)
        nothing = tl.zeros([16, 16], tl.float32)
        store_rows(scores + other, G * SIZE, left, r, nothing, 16, 16)
        if CORRECTS:
            store_rows(corrections + other, G * SIZE, left, r, nothing, 16, 16)
    write = block_writes(writes, w_token, gain, G, count, start, key, K, GAINS)
    store_rows(w_out + (row + start * G) * K, G * K, left, key, write * tl.exp(rest + after[None, :]), K, 16)
    if own == 0:
        tl.store(across + (index.to(tl.int64) * G + head) * K + key, tl.exp(total + after), mask=key < K)

    score = tl.zeros([16, 16], tl.float32)
    correction = tl.zeros([16, 16], tl.float32)
    lag = tl.zeros([16, WIDTH], tl.float32)
    inside = tl.minimum(left, 16)
    for back in range(inside):
        s = inside - 1 - back
        here = key < K
        write = tl.load(writes + (start + s) * w_token + key, mask=here, other=0.0).to(tl.float32)
        if GAINS:
            write *= tl.load(gain + (start + s) * G).to(tl.float32)
        write = tl.where((r >= s)[:, None], tl.exp(lag), 0.0) * write[None, :]
        score = tl.where((r == s)[None, :], tl.sum(query * write, 1)[:, None], score)
        if CORRECTS:
            column = tl.where(r > s, tl.sum(known * write, 1), 0.0)
            correction = tl.where((r == s)[None, :], column[:, None], correction)
        decay = tl.load(log_decay + (start + s) * d_token + key, mask=here, other=0.0).to(tl.float32)
        lag = tl.where((r >= s)[:, None], lag + decay[None, :], 0.0)
    store_rows(scores + start, G * SIZE, left, r, score, 16, 16)
    if CORRECTS:
        store_rows(corrections + start, G * SIZE, left, r, correction, 16, 16)


@triton.jit(do_not_specialize=[*LOOSE, "tokens"])
def unfold(
    q, k, writes, gain, log_decay, q_in, k_in, w_out, across, grad_q_in, grad_k_in, grad_w_out, grad_across,
    dscores, dcorrections, dq, dk, dwrites, dgain, dlog_decay, table, length, tiles, tokens,
    q_token, q_head, k_token, k_head, w_token, w_head, d_token, d_head, G, SHARE, W_SHARE,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, GAINS: tl.constexpr,
    VECTOR: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block, some columns, from those of what it was folded into."""
    BLOCKS: tl.constexpr = SIZE // 16
    index, own, head, part = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1), tl.program_id(2)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    start = own * 16
    if start >= count:
        return
    KIND: tl.constexpr = q_in.dtype.element_ty
    key, r = part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 16)
    row = token * G + head
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    writes += token * w_token + head // W_SHARE * w_head
    log_decay += token * d_token + head * d_head
    gain += row
    dscores += row * SIZE
    dcorrections += row * SIZE
    at = row * K
    left = count - start
    since, rest, total = block_decays(log_decay, d_token, count, start, key, K)
    query = load_rows(q + start * q_token, q_token, left, key, K, 16).to(tl.float32)
    known = load_rows(k + start * k_token, k_token, left, key, K, 16).to(tl.float32)

    # What this block reads of those before it, and what they leave for the exit through it.
    by_query = tl.zeros([16, BLOCK], tl.float32)
    by_key = tl.zeros([16, BLOCK], tl.float32)
    passing = tl.load(across + (index.to(tl.int64) * G + head) * K + key, mask=key < K, other=0.0)
    passing *= tl.load(grad_across + (index.to(tl.int64) * G + head) * K + key, mask=key < K, other=0.0)
    before = tl.zeros([BLOCK], tl.float32)
    for back in range(own):
        other = (own - 1 - back) * 16
        _since, until, over = block_decays(log_decay, d_token, count, other, key, K)
        write = block_writes(writes, w_token, gain, G, count, other, key, K, GAINS)
        write = (write * tl.exp(until + before[None, :])).to(KIND)
        asked = load_rows(dscores + start * G * SIZE + other, G * SIZE, left, r, 16, 16)
        by_query = product(asked, write, PRECISION, by_query)
        if CORRECTS:
            fixed = load_rows(dcorrections + start * G * SIZE + other, G * SIZE, left, r, 16, 16)
            by_key = product(fixed, write, PRECISION, by_key)
        left_over = load_rows(w_out + at + other * G * K, G * K, 16, key, K, 16).to(tl.float32)
        left_over *= load_rows(grad_w_out + at + other * G * K, G * K, 16, key, K, 16).to(tl.float32)
        passing += tl.sum(left_over, 0)
        before += over
    by_query *= tl.exp(since)
    by_key *= tl.exp(since)
    entry = tl.exp(since + before[None, :])
    by_query += entry * load_rows(grad_q_in + at + start * G * K, G * K, left, key, K, 16).to(tl.float32)
    if CORRECTS:
        by_key += entry * load_rows(grad_k_in + at + start * G * K, G * K, left, key, K, 16).to(tl.float32)
    by_reader = query * by_query + known * by_key

    # What blocks after it read of this one, and, through it, of the entry and of the blocks before.
    by_write = tl.zeros([16, BLOCK], tl.float32)
    after = tl.zeros([BLOCK], tl.float32)
    for other in range(start + 16, SIZE, 16):
        gone, _rest, over = block_decays(log_decay, d_token, count, other, key, K)
        fade = tl.exp(gone + after[None, :])
        asking = load_rows(q + other * q_token, q_token, count - other, key, K, 16).to(tl.float32) * fade
        asked = load_columns(dscores + other * G * SIZE + start, G * SIZE, count - other, r, 16, 16)
        by_write = product(asked, asking.to(KIND), PRECISION, by_write)
        entered = load_rows(q_in + at + other * G * K, G * K, count - other, key, K, 16).to(tl.float32)
        entered *= load_rows(grad_q_in + at + other * G * K, G * K, count - other, key, K, 16).to(tl.float32)
        passing += tl.sum(entered, 0)
        fixing = tl.zeros([16, BLOCK], tl.float32)
        if CORRECTS:
            fixing = load_rows(k + other * k_token, k_token, count - other, key, K, 16).to(tl.float32) * fade
            fixed = load_columns(dcorrections + other * G * SIZE + start, G * SIZE, count - other, r, 16, 16)
            by_write = product(fixed, fixing.to(KIND), PRECISION, by_write)
            entered = load_rows(k_in + at + other * G * K, G * K, count - other, key, K, 16).to(tl.float32)
            entered *= load_rows(grad_k_in + at + other * G * K, G * K, count - other, key, K, 16).to(tl.float32)
            passing += tl.sum(entered, 0)
        through = total
        for back in range(own):
            early = (own - 1 - back) * 16
            _since, until, between = block_decays(log_decay, d_token, count, early, key, K)
            write = block_writes(writes, w_token, gain, G, count, early, key, K, GAINS)
            write = (write * tl.exp(until + through[None, :])).to(KIND)
            asked = load_rows(dscores + other * G * SIZE + early, G * SIZE, count - other, r, 16, 16)
            passing += tl.sum(asking * product(asked, write, PRECISION), 0)
            if CORRECTS:
                fixed = load_rows(dcorrections + other * G * SIZE + early, G * SIZE, count - other, r, 16, 16)
                passing += tl.sum(fixing * product(fixed, write, PRECISION), 0)
            through += between
        after += over
    by_write *= tl.exp(rest)
    by_exit = load_rows(grad_w_out + at + start * G * K, G * K, left, key, K, 16).to(tl.float32)
    by_write += by_exit * tl.exp(rest + after[None, :])
    by_writer = block_writes(writes, w_token, gain, G, count, start, key, K, GAINS) * by_write
    by_decay = product((r[:, None] <= r[None, :]).to(tl.float32), by_reader, "tf32x3")
    by_decay = product((r[:, None] > r[None, :]).to(tl.float32), by_writer, "tf32x3", by_decay)
    by_decay += passing[None, :]

    # Pairs inside the block.
    lag = tl.zeros([16, BLOCK], tl.float32)
    inside = tl.minimum(left, 16)
    for back in range(inside):
        s = inside - 1 - back
        here = key < K
        write = tl.load(writes + (start + s) * w_token + key, mask=here, other=0.0).to(tl.float32)
        if GAINS:
            write *= tl.load(gain + (start + s) * G).to(tl.float32)
        fade = tl.where((r >= s)[:, None], tl.exp(lag), 0.0)
        column = (start + r) * G * SIZE + start + s
        asked = tl.load(dscores + column, mask=r < left, other=0.0).to(tl.float32)[:, None]
        pull = asked * query
        by_query += asked * fade * write[None, :]
        if CORRECTS:
            fixed = tl.load(dcorrections + column, mask=r < left, other=0.0).to(tl.float32)[:, None]
            pull += fixed * known
            by_key += fixed * fade * write[None, :]
        pull *= fade
        by_write += tl.where((r == s)[:, None], tl.sum(pull, 0)[None, :], 0.0)
        pull = tl.where((r > s)[:, None], pull * write[None, :], 0.0)
        by_decay += tl.where((r > s)[:, None], tl.cumsum(pull, 0, reverse=True), 0.0)
        decay = tl.load(log_decay + (start + s) * d_token + key, mask=here, other=0.0).to(tl.float32)
        lag = tl.where((r >= s)[:, None], lag + decay[None, :], 0.0)

    at += start * G * K
    if GAINS:
        own_write = load_rows(writes + start * w_token, w_token, left, key, K, 16).to(tl.float32)
        to = dgain + part * tokens * G + row + (start + r) * G
        tl.store(to, tl.sum(own_write * by_write, 1), mask=r < left)
        by_write *= load_per_token(gain + start * G, left, G, 16)[:, None]
    if VECTOR:
        store_rows(dwrites + at, G * K, left, key, by_write, K, 16)
    else:
        by_key += by_write
    store_rows(dq + at, G * K, left, key, by_query, K, 16)
    store_rows(dk + at, G * K, left, key, by_key, K, 16)
    store_rows(dlog_decay + at, G * K, left, key, by_decay, K, 16)
