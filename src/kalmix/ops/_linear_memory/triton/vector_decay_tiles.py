"""Decays per key inside tiles, joined from subtiles: between two subtiles, the decay is one number per key.

With q~, k~ and w^ of subtiles (`vector_decay`), those of a tile of two or four subtiles are the same, times the decays
of the subtiles before or after. Scores of pairs in the subtiles 2 i and 2 i + 1 are products of these; pairs on
either side of the middle of four subtiles also decay over the subtiles in between. Every factor is at most 1.

If the forward pass has stored S and the results of subtiles, the backward pass only multiplies those by the decays of
other subtiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._linear_memory.triton.vector_decay import SUBTILE, load_edge_decays
from kalmix.ops._shared.triton.tiles import (
    UNSPECIALIZED,
    load_rows,
    locate_tile,
    matmul,
    store_rows,
)


@triton.jit
def load_subtile_decays(subtile_decays, tile, head, key, G, K: tl.constexpr, SUBTILES: tl.constexpr):
    """Return the decay of each subtile of a tile, `[keys]` each."""
    decays = ()
    for i in tl.static_range(SUBTILES):
        decays += (tl.load(subtile_decays + ((tile * SUBTILES + i) * G + head) * K + key, mask=key < K, other=0.0),)
    return decays


@triton.jit
def decays_to_edges(decays, subtile):
    """Return the decays over the subtiles before that of each token, and over those after it, `[SIZE, keys]`."""
    SUBTILES: tl.constexpr = len(decays)
    to_start, to_end, prefix, suffix = 1.0, 1.0, 1.0, 1.0
    for i in tl.static_range(1, SUBTILES):
        prefix *= decays[i - 1]
        suffix *= decays[SUBTILES - i]
        to_start = tl.where((subtile == i)[:, None], prefix[None, :], to_start)
        to_end = tl.where((subtile == SUBTILES - 1 - i)[:, None], suffix[None, :], to_end)
    return to_start, to_end


@triton.jit
def decay_to_middle(decays, subtile):
    """Return the decay over the subtile between that of each token and the middle of a tile of four, `[SIZE, keys]`."""
    decay = tl.where((subtile == 0)[:, None], decays[1][None, :], 1.0)
    return tl.where((subtile == 3)[:, None], decays[2][None, :], decay)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def join_subtiles(
    q, k, w, subtile_decays, q_in, k_in, w_out, tile_decay, scores, corrections, tile_table, length, tiles, G,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, CORRECTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store q~, k~ and w^ of a tile, S and N for pairs of tokens in different subtiles, and the decay of the tile."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    if count == 0:
        return
    DTYPE: tl.constexpr = q_in.dtype.element_ty
    SUBTILES: tl.constexpr = SIZE // SUBTILE
    t = tl.arange(0, SIZE)
    row = token * G + head
    near_score = tl.zeros([SIZE, SIZE], tl.float32)
    near_correction = tl.zeros([SIZE, SIZE], tl.float32)
    far_score = tl.zeros([SIZE, SIZE], tl.float32)
    far_correction = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, K, BLOCK):
        key = start + tl.arange(0, BLOCK)
        decays = load_subtile_decays(subtile_decays, index.to(tl.int64), head, key, G, K, SUBTILES)
        query = load_rows(q + row * K, G * K, count, key, K, SIZE)
        write = load_rows(w + row * K, G * K, count, key, K, SIZE)
        key_rows = query
        if CORRECTS:
            key_rows = load_rows(k + row * K, G * K, count, key, K, SIZE)
        near_score = matmul(query, tl.trans(write), PRECISION, near_score)
        if CORRECTS:
            near_correction = matmul(key_rows, tl.trans(write), PRECISION, near_correction)
        if SUBTILES == 4:
            decay = decay_to_middle(decays, t // SUBTILE)
            decayed_write = tl.trans((write * decay).to(DTYPE))
            far_score = matmul((query * decay).to(DTYPE), decayed_write, PRECISION, far_score)
            if CORRECTS:
                far_correction = matmul((key_rows * decay).to(DTYPE), decayed_write, PRECISION, far_correction)
        to_start, to_end = decays_to_edges(decays, t // SUBTILE)
        store_rows(q_in + row * K, G * K, count, key, query * to_start, K, SIZE)
        if CORRECTS:
            store_rows(k_in + row * K, G * K, count, key, key_rows * to_start, K, SIZE)
        store_rows(w_out + row * K, G * K, count, key, write * to_end, K, SIZE)
        total = decays[0]
        for i in tl.static_range(1, SUBTILES):
            total *= decays[i]
        tl.store(tile_decay + (index.to(tl.int64) * G + head) * K + key, total, mask=key < K)
    score, correction = near_score, near_correction
    if SUBTILES == 4:
        far = t[:, None] // (2 * SUBTILE) > t[None, :] // (2 * SUBTILE)
        score, correction = tl.where(far, far_score, score), tl.where(far, far_correction, correction)
    inside = (t < count)[:, None] & (t[:, None] // SUBTILE != t[None, :] // SUBTILE)
    earlier = t[:, None] > t[None, :]
    at = row * SIZE + t[:, None] * G * SIZE + t[None, :]
    tl.store(scores + at, tl.where(earlier, score, 0.0).to(DTYPE), mask=inside)
    if CORRECTS:
        tl.store(corrections + at, tl.where(earlier, correction, 0.0), mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decay_subtiles(
    subtile_q, subtile_k, subtile_w, subtile_decays, q_in, k_in, w_out, tile_decay, tile_table, length, tiles, G,
    K: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Store q~, k~ and w^ of a tile, for one of its subtiles and some keys, and the decay of the tile.

    These are the results of `join_subtiles` without S and N.
    """
    head = tl.program_id(1)
    SUBTILES: tl.constexpr = SIZE // SUBTILE
    index, subtile = (tl.program_id(0) // SUBTILES).to(tl.int64), tl.program_id(0) % SUBTILES
    token, tile_count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    count = tl.minimum(tile_count - subtile * SUBTILE, SUBTILE)
    if count <= 0:
        return
    key = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    at = ((token + subtile * SUBTILE) * G + head) * K
    tile_decays = subtile_decays + (index * SUBTILES * G + head) * K
    query = load_rows(subtile_q + at, G * K, count, key, K, SUBTILE)
    write = load_rows(subtile_w + at, G * K, count, key, K, SUBTILE)
    key_rows = query
    if CORRECTS:
        key_rows = load_rows(subtile_k + at, G * K, count, key, K, SUBTILE)
    to_start, to_end = load_edge_decays(tile_decays, G * K, subtile, key, K, SUBTILES)
    store_rows(q_in + at, G * K, count, key, query * to_start[None, :], K, SUBTILE)
    if CORRECTS:
        store_rows(k_in + at, G * K, count, key, key_rows * to_start[None, :], K, SUBTILE)
    store_rows(w_out + at, G * K, count, key, write * to_end[None, :], K, SUBTILE)
    if subtile == 0:
        total = tl.load(tile_decays + key, mask=key < K, other=0.0) * to_end
        tl.store(tile_decay + (index * G + head) * K + key, total, mask=key < K)
