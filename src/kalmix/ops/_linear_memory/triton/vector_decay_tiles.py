"""Tiles from pieces: what decays per key leave of one piece of a tile at another is one number a key.

With q^, k^ and w^ the signals of a piece as `triton_keys` folds them, decayed from its entry and to its exit, those of
a tile of two or four pieces are the same, times the decays across the pieces before, or after. Pairs of tokens of
pieces 2 i and 2 i + 1 are products of what was folded; those across the middle of four pieces decay across what pieces
lie between, too. Every factor is at most 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._linear_memory.triton.vector_decay import PIECE
from kalmix.ops._shared.triton.tiles import UNSPECIALIZED, load_rows, locate_tile, matmul, store_rows


@triton.jit
def across_pieces(paths, tile, head, key, G, K: tl.constexpr, PIECES: tl.constexpr):
    """The decay across each piece of a tile, `[keys]` each."""
    found = ()
    for i in tl.static_range(PIECES):
        found += (tl.load(paths + ((tile * PIECES + i) * G + head) * K + key, mask=key < K, other=0.0),)
    return found


@triton.jit
def to_edges(found, piece):
    """The decay across the pieces before that of each token, and across those after it, `[SIZE, keys]`."""
    PIECES: tl.constexpr = len(found)
    entry, rest, rise, fall = 1.0, 1.0, 1.0, 1.0
    for i in tl.static_range(1, PIECES):
        rise *= found[i - 1]
        fall *= found[PIECES - i]
        entry = tl.where((piece == i)[:, None], rise[None, :], entry)
        rest = tl.where((piece == PIECES - 1 - i)[:, None], fall[None, :], rest)
    return entry, rest


@triton.jit
def to_middle(found, piece):
    """The decay across the piece between each token's and the middle of a tile of four, `[SIZE, keys]`."""
    fade = tl.where((piece == 0)[:, None], found[1][None, :], 1.0)
    return tl.where((piece == 3)[:, None], found[2][None, :], fade)


@triton.jit
def faces(t, HALF: tl.constexpr):
    """Which `[t, s]` lie in the upper and the lower half of one block of 2 HALF tokens."""
    upper = t[:, None] // HALF == t[None, :] // HALF + 1
    return upper & (t[:, None] // (2 * HALF) == t[None, :] // (2 * HALF))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def join(
    q, k, w, paths, q_in, k_in, w_out, across, scores, corrections, table, length, tiles, G,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, CORRECTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q~, k~ and w^ of a tile from its pieces, the rest of S and N, and the decay across it."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = locate_tile(table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = q_in.dtype.element_ty
    PIECES: tl.constexpr = SIZE // PIECE
    t = tl.arange(0, SIZE)
    row = token * G + head
    score = tl.zeros([SIZE, SIZE], tl.float32)
    correction = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, K, BLOCK):
        key = start + tl.arange(0, BLOCK)
        found = across_pieces(paths, index.to(tl.int64), head, key, G, K, PIECES)
        query = load_rows(q + row * K, G * K, count, key, K, SIZE)
        write = load_rows(w + row * K, G * K, count, key, K, SIZE)
        known = query
        if CORRECTS:
            known = load_rows(k + row * K, G * K, count, key, K, SIZE)
        faded = tl.trans(write)
        asked = matmul(query, faded, PRECISION)
        fixed = asked
        if CORRECTS:
            fixed = matmul(known, faded, PRECISION)
        if PIECES == 4:
            fade = to_middle(found, t // PIECE)
            faded = tl.trans((write * fade).to(KIND))
            pairs = t[:, None] // 32 > t[None, :] // 32
            asked = tl.where(pairs, matmul((query * fade).to(KIND), faded, PRECISION), asked)
            if CORRECTS:
                fixed = tl.where(pairs, matmul((known * fade).to(KIND), faded, PRECISION), fixed)
        score += asked
        correction += fixed
        entry, rest = to_edges(found, t // PIECE)
        store_rows(q_in + row * K, G * K, count, key, query * entry, K, SIZE)
        if CORRECTS:
            store_rows(k_in + row * K, G * K, count, key, known * entry, K, SIZE)
        store_rows(w_out + row * K, G * K, count, key, write * rest, K, SIZE)
        total = found[0]
        for i in tl.static_range(1, PIECES):
            total *= found[i]
        tl.store(across + (index.to(tl.int64) * G + head) * K + key, total, mask=key < K)
    inside = (t < count)[:, None] & (t[:, None] // PIECE != t[None, :] // PIECE)
    earlier = t[:, None] > t[None, :]
    at = row * SIZE + t[:, None] * G * SIZE + t[None, :]
    tl.store(scores + at, tl.where(earlier, score, 0.0).to(KIND), mask=inside)
    if CORRECTS:
        tl.store(corrections + at, tl.where(earlier, correction, 0.0), mask=inside)


@triton.jit
def load_facing(base, stride, count, t, HALF: tl.constexpr, FLIP: tl.constexpr):
    pairs = faces(t, HALF)
    if FLIP:
        return tl.load(base + t[None, :] * stride + t[:, None], mask=tl.trans(pairs) & (t < count)[None, :], other=0.0)
    return tl.load(base + t[:, None] * stride + t[None, :], mask=pairs & (t < count)[:, None], other=0.0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def part(
    q, k, w, paths, across, grad_q_in, grad_k_in, grad_w_out, grad_across, dscores, dcorrections,
    dq, dk, dw, shared, table, length, tiles, G,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, CORRECTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of pieces, some columns, from those of their tile; `shared` is that of the log-decay across each.

    Shares of a piece's decay are sums over the tokens before, or after it: products with ones and zeros, too.
    """
    index, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, count = locate_tile(table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    KIND: tl.constexpr = dq.dtype.element_ty
    PIECES: tl.constexpr = SIZE // PIECE
    t, i = tl.arange(0, SIZE), tl.arange(0, 16)[:, None]
    key, piece = block * BLOCK + tl.arange(0, BLOCK), t // PIECE
    row = token * G + head
    found = across_pieces(paths, index.to(tl.int64), head, key, G, K, PIECES)
    query = load_rows(q + row * K, G * K, count, key, K, SIZE)
    known = query
    if CORRECTS:
        known = load_rows(k + row * K, G * K, count, key, K, SIZE)
    write = load_rows(w + row * K, G * K, count, key, K, SIZE)
    entry, rest = to_edges(found, piece)
    by_query = entry * load_rows(grad_q_in + row * K, G * K, count, key, K, SIZE)
    shares = query * by_query
    by_key = tl.zeros([SIZE, BLOCK], tl.float32)
    if CORRECTS:
        by_key = entry * load_rows(grad_k_in + row * K, G * K, count, key, K, SIZE)
        shares += known * by_key
    passed = matmul(tl.where(piece[None, :] > i, 1.0, 0.0).to(KIND), shares.to(KIND), PRECISION)
    by_write = rest * load_rows(grad_w_out + row * K, G * K, count, key, K, SIZE)
    shares = write * by_write
    passed = matmul(tl.where(piece[None, :] < i, 1.0, 0.0).to(KIND), shares.to(KIND), PRECISION, passed)
    scores, fixes = dscores + row * SIZE, dcorrections + row * SIZE
    by_query = matmul(load_facing(scores, G * SIZE, count, t, 16, False), write, PRECISION, by_query)
    by_write = matmul(load_facing(scores, G * SIZE, count, t, 16, True), query, PRECISION, by_write)
    if CORRECTS:
        by_key = matmul(load_facing(fixes, G * SIZE, count, t, 16, False), write, PRECISION, by_key)
        by_write = matmul(load_facing(fixes, G * SIZE, count, t, 16, True), known, PRECISION, by_write)
    if PIECES == 4:
        fade = to_middle(found, piece)
        wrote, reads = (write * fade).to(KIND), (query * fade).to(KIND)
        readers = matmul(load_facing(scores, G * SIZE, count, t, 32, False), wrote, PRECISION)
        by_query += readers * fade
        shares = readers * reads
        writers = matmul(load_facing(scores, G * SIZE, count, t, 32, True), reads, PRECISION)
        if CORRECTS:
            reads = (known * fade).to(KIND)
            readers = matmul(load_facing(fixes, G * SIZE, count, t, 32, False), wrote, PRECISION)
            by_key += readers * fade
            shares += readers * reads
            writers = matmul(load_facing(fixes, G * SIZE, count, t, 32, True), reads, PRECISION, writers)
        by_write += writers * fade
        shares += writers * wrote
        inner = ((piece[None, :] == 0) & (i == 1)) | ((piece[None, :] == 3) & (i == 2))
        passed = matmul(tl.where(inner, 1.0, 0.0).to(KIND), shares.to(KIND), PRECISION, passed)
    at = (index.to(tl.int64) * G + head) * K + key
    kept = tl.load(across + at, mask=key < K, other=0.0) * tl.load(grad_across + at, mask=key < K, other=0.0)
    at = ((index.to(tl.int64) * PIECES + i) * G + head) * K + key[None, :]
    tl.store(shared + at, passed + kept[None, :], mask=(i < PIECES) & (key < K)[None, :])
    store_rows(dq + row * K, G * K, count, key, by_query, K, SIZE)
    if CORRECTS:
        store_rows(dk + row * K, G * K, count, key, by_key, K, SIZE)
    store_rows(dw + row * K, G * K, count, key, by_write, K, SIZE)
