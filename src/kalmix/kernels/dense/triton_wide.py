"""The two sequential passes of `dense` in Triton for covariances too wide for registers: they stay in memory.

The same algebra as `triton._advance` and `triton_backward._retreat`, over bands of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.kernels.dense.triton_parts import COUNTS, faded, inverse_cholesky, narrow_product, product
from kalmix.kernels.primitives.triton_tiles import run_of


@triton.jit(do_not_specialize=COUNTS)
def advance_wide(
    obs_noise, keys, queries, noises, innovations, edges, projected, asked, kept, states, scratch, runs,
    length, tiles, G,
    K: tl.constexpr, P: tl.constexpr, BAND: tl.constexpr, STRIP: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    PACKED: tl.constexpr, KEEP: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile, token, count = run_of(runs, sequence, length, tiles, PACKED)
    PIECES: tl.constexpr = WINDOW // BLOCK
    row, band, strip = tl.arange(0, BLOCK), tl.arange(0, BAND), tl.arange(0, STRIP)
    states += (sequence * G + head) * (P * P)
    scratch += (sequence * G + head) * (BLOCK * P)
    for block in range(tl.cdiv(count, BLOCK)):
        slot = (tile * PIECES + block) * G + head
        base, edge = slot * (BLOCK * P), edges + slot * 2 * P
        C = tl.load(innovations + slot * (BLOCK * BLOCK) + row[:, None] * BLOCK + row[None, :])
        t = block * BLOCK + row
        observed = tl.load(obs_noise + (token + t) * G + head, mask=t < count, other=float("inf")).to(tl.float32)
        for start in range(0, P, BAND):
            i = start + band
            rows_of = row[None, :] * P + i[:, None]
            seen = tl.zeros([BAND, BLOCK], tl.float32)
            answer = tl.zeros([BAND, BLOCK], tl.float32)
            for left in range(0, P, STRIP):
                j = left + strip
                state = tl.load(states + i[:, None] * P + j[None, :])
                if KEEP and block % PIECES == 0:
                    to = kept + ((tile + block // PIECES) * G + head) * (P * P)
                    tl.store(to + i[:, None] * P + j[None, :], state)
                seen += product(state, tl.load(keys + base + row[None, :] * P + j[:, None]), SPLIT)
                if VARIANCE:
                    answer += product(state, tl.load(queries + base + row[None, :] * P + j[:, None]), SPLIT)
            tl.store(projected + base + rows_of, seen)
            if VARIANCE:
                tl.store(asked + base + rows_of, answer)
            key = tl.load(keys + base + row[:, None] * P + i[None, :])
            C += narrow_product(key, seen, SPLIT, BLOCK, BAND)
        root = inverse_cholesky(C, tl.min(observed, 0), BLOCK)
        tl.debug_barrier()  # what one thread stored another may load
        for start in range(0, P, BAND):
            i = start + band
            rows_of = row[None, :] * P + i[:, None]
            seen = tl.load(projected + base + rows_of) * tl.load(edge + i)[:, None] + tl.load(noises + base + rows_of)
            tl.store(scratch + rows_of, product(seen, tl.trans(root), SPLIT))
        tl.debug_barrier()
        for start in range(0, P, BAND):
            i = start + band
            write = tl.load(scratch + row[None, :] * P + i[:, None])
            gathered = tl.load(edge + P + i)
            for left in range(0, P, STRIP):
                j = left + strip
                state = faded(tl.load(states + i[:, None] * P + j[None, :]), edge, i, j, DECAY)
                state += tl.where(i[:, None] == j[None, :], gathered[:, None], 0.0)
                state -= product(write, tl.load(scratch + row[:, None] * P + j[None, :]), SPLIT)
                tl.store(states + i[:, None] * P + j[None, :], state)
        tl.debug_barrier()


@triton.jit(do_not_specialize=COUNTS)
def retreat_wide(
    keys, writes, local, asked, grad_read, edges, kept, adjoints, exits, spreads, balance, scratch, runs,
    length, tiles, G,
    K: tl.constexpr, P: tl.constexpr, BAND: tl.constexpr, STRIP: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    PACKED: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile, token, count = run_of(runs, sequence, length, tiles, PACKED)
    PIECES: tl.constexpr = WINDOW // BLOCK
    row, band, strip = tl.arange(0, BLOCK), tl.arange(0, BAND), tl.arange(0, STRIP)
    adjoints += (sequence * G + head) * (P * P)
    scratch += (sequence * G + head) * (BLOCK * P)
    blocks = tl.cdiv(count, BLOCK)
    for back in range(blocks):
        block = blocks - 1 - back
        slot = (tile * PIECES + block) * G + head
        base, edge = slot * (BLOCK * P), edges + slot * P
        every = tl.arange(0, P)
        tl.store(spreads + slot * P + every, tl.load(adjoints + every * P + every))
        twice = tl.zeros([BLOCK, BLOCK], tl.float32)
        for start in range(0, P, BAND):
            i = start + band
            leaving = tl.zeros([BAND, BLOCK], tl.float32)
            for left in range(0, P, STRIP):
                j = left + strip
                adjoint = tl.load(adjoints + i[:, None] * P + j[None, :])
                leaving += product(adjoint, tl.load(writes + base + row[None, :] * P + j[:, None]), SPLIT)
            tl.store(exits + base + row[None, :] * P + i[:, None], leaving)
            write = tl.load(writes + base + row[:, None] * P + i[None, :])
            twice += narrow_product(write, leaving, SPLIT, BLOCK, BAND)
        tl.debug_barrier()  # what one thread stored another may load
        for start in range(0, P, BAND):
            i = start + band
            rows_of = row[None, :] * P + i[:, None]
            change = tl.load(local + base + rows_of) - tl.load(exits + base + rows_of) * tl.load(edge + i)[:, None]
            change += product(tl.load(keys + base + rows_of), 0.5 * twice, SPLIT)
            tl.store(scratch + rows_of, change)
        tl.debug_barrier()
        for start in range(0, P, BAND):
            i = start + band
            rows_of = row[None, :] * P + i[:, None]
            change, turned = tl.load(scratch + rows_of), tl.load(keys + base + rows_of)
            flow = tl.zeros([BAND], tl.float32)
            for left in range(0, P, STRIP):
                j = left + strip
                square, columns_of = i[:, None] * P + j[None, :], row[:, None] * P + j[None, :]
                moved = product(change, tl.load(keys + base + columns_of), SPLIT)
                moved = product(turned, tl.load(scratch + columns_of), SPLIT, moved)
                if VARIANCE:
                    t = block * BLOCK + row
                    weight = tl.load(grad_read + (token + t) * G + head, mask=t < count, other=0.0).to(tl.float32)
                    query = tl.load(asked + base + rows_of) * weight[None, :]
                    moved = product(query, tl.load(asked + base + columns_of), SPLIT, moved)
                adjoint = faded(tl.load(adjoints + square), edge, i, j, DECAY) + moved
                tl.store(adjoints + square, adjoint)
                if (DECAY > 0) and block % PIECES == 0:
                    state = tl.load(kept + ((tile + block // PIECES) * G + head) * (P * P) + square)
                    flow += tl.sum(adjoint * state, 1)
            if (DECAY > 0) and block % PIECES == 0:
                tl.store(balance + ((tile + block // PIECES) * G + head) * P + i, flow)
        tl.debug_barrier()
