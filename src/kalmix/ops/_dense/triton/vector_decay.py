"""`dense` in Triton where decays are one a key: blocks token by token, each decaying what those before it left.

What `triton_blocks` does by products would take one a level of halves here, with as many decays as keys. Products are
left where whole blocks meet: with the covariance, and at their exits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._dense.triton.parts import COUNTS, block_of, chain_options, faded, product
from kalmix.ops._shared.triton.tiles import place_of, tile_of


def options(stage: str, kind: int, lanes: int, parts: int) -> dict[str, int]:
    """How a stage is compiled; a covariance steps through the windows of the last."""
    if stage == "finish":
        return chain_options(lanes, 3 if parts else 0)
    return {"num_warps": max(1, lanes // 128)} | ({"SPLIT": parts} if stage == "gather" else {})


@triton.jit
def _decay_of(log_decay, at, lane, K: tl.constexpr):
    """Decays of one token, `[P]`."""
    return tl.exp(tl.load(log_decay + at * K + lane, mask=lane < K, other=0.0).to(tl.float32))


@triton.jit(do_not_specialize=COUNTS)
def prepare(
    q, k, obs_noise, process_noise, log_decay, keys, queries, noises, innovations, edges, table, length, tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr,
):  # fmt: skip
    index, head, _part = place_of(G, 1)
    token, count = block_of(table, index, length, tiles, BLOCK, WINDOW, PACKED)
    if count <= 0:
        return
    lane, row = tl.arange(0, P), tl.arange(0, BLOCK)
    slot = index.to(tl.int64) * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    keys += slot * (BLOCK * P) + lane[None, :]
    queries += slot * (BLOCK * P) + lane[None, :]
    innovations += slot * (BLOCK * BLOCK)
    reach = tl.full([P], 1.0, tl.float32)
    noise = tl.zeros([P], tl.float32)
    carried = tl.zeros([BLOCK, P], tl.float32)
    column, beyond = tl.arange(0, BLOCK)[None, :], row[:, None] >= count  # tokens there are none of say nothing
    identity = (row[:, None] == column).to(tl.float32)
    tl.store(innovations + row[:, None] * BLOCK + column, identity, mask=beyond | (column >= count))
    tl.store(keys + row[:, None] * P, carried, mask=beyond & (lane >= 0)[None, :])
    if VARIANCE:
        tl.store(queries + row[:, None] * P, carried, mask=beyond & (lane >= 0)[None, :])
    for t in range(count):
        at = (token + t) * G + head
        key = tl.load(k + t * k_token + lane, mask=lane < K, other=0.0).to(tl.float32)
        decay = _decay_of(log_decay, at, lane, K)
        reach *= decay
        noise = decay * decay * noise + tl.load(process_noise + at).to(tl.float32)
        now = row == t
        carried = tl.where(now[:, None], (noise * key)[None, :], carried * decay[None, :])
        line = tl.sum(carried * key[None, :], 1)
        line = tl.where(now, line + tl.load(obs_noise + at).to(tl.float32), line)
        tl.store(innovations + t * BLOCK + row, line, mask=row <= t)
        tl.store(innovations + row * BLOCK + t, line, mask=row < t)
        tl.store(keys + t * P, (key * reach)[None, :])
        if VARIANCE:
            query = tl.load(q + t * q_token + lane, mask=lane < K, other=0.0).to(tl.float32)
            tl.store(queries + t * P, (query * reach)[None, :])
    tl.store(noises + slot * (BLOCK * P) + row[:, None] * P + lane[None, :], carried)
    tl.store(edges + slot * 2 * P + lane, reach)
    tl.store(edges + slot * 2 * P + P + lane, noise)


@triton.jit(do_not_specialize=COUNTS)
def gains(
    q, k, obs_noise, process_noise, log_decay, innovations, projected, asked, gain, rounded, scale, read, table, length,
    tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr,
):  # fmt: skip
    index, head, _part = place_of(G, 1)
    token, count = block_of(table, index, length, tiles, BLOCK, WINDOW, PACKED)
    lane, row = tl.arange(0, P), tl.arange(0, BLOCK)
    slot = index.to(tl.int64) * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    projected += slot * (BLOCK * P) + lane
    asked += slot * (BLOCK * P) + lane
    reach = tl.full([P], 1.0, tl.float32)
    noise = tl.zeros([P], tl.float32)
    written = tl.zeros([BLOCK, P], tl.float32)  # the gain of every token so far, decayed
    scales = tl.zeros([BLOCK], tl.float32)
    for t in range(count):
        at = (token + t) * G + head
        key = tl.load(k + t * k_token + lane, mask=lane < K, other=0.0).to(tl.float32)
        decay = _decay_of(log_decay, at, lane, K)
        reach *= decay
        noise = decay * decay * noise + tl.load(process_noise + at).to(tl.float32)
        written *= decay[None, :]
        known = scales * tl.sum(written * key[None, :], 1)
        warped = reach * tl.load(projected + t * P) + noise * key - tl.sum(written * known[:, None], 0)
        total = tl.load(obs_noise + at).to(tl.float32) + tl.maximum(tl.sum(key * warped, 0), 0.0)
        this = warped / total
        tl.store(gain + at * K + lane, this, mask=lane < K)
        if gain.dtype != rounded.dtype:
            tl.store(rounded + at * K + lane, this.to(rounded.dtype.element_ty), mask=lane < K)
        tl.store(scale + at, total)
        written = tl.where((row == t)[:, None], this[None, :], written)
        scales = tl.where(row == t, total, scales)
        if VARIANCE:
            query = tl.load(q + t * q_token + lane, mask=lane < K, other=0.0).to(tl.float32)
            known = scales * tl.sum(written * query[None, :], 1)
            spread = reach * tl.load(asked + t * P) + noise * query - tl.sum(written * known[:, None], 0)
            tl.store(read + at, tl.maximum(tl.sum(query * spread, 0), 0.0))


@triton.jit(do_not_specialize=COUNTS)
def gather(
    q, k, log_decay, gain, scale, grad_gain, keys, writes, local, asked, coefficients, edges, table, length, tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    index, head, _part = place_of(G, 1)
    token, count = block_of(table, index, length, tiles, BLOCK, WINDOW, PACKED)
    if count <= 0:
        return
    lane, row = tl.arange(0, P), tl.arange(0, BLOCK)
    slot = index.to(tl.int64) * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    flat = slot * (BLOCK * P) + row[:, None] * P + lane[None, :]
    coefficients += slot * (3 * BLOCK * BLOCK)
    square, turn = row[:, None] * BLOCK + row[None, :], row[None, :] * BLOCK + row[:, None]
    rest, none = row[:, None] >= count, tl.zeros([BLOCK, BLOCK], tl.float32)
    for part in tl.static_range(3):
        tl.store(coefficients + part * BLOCK * BLOCK + square, none, mask=rest)
    reach = tl.full([P], 1.0, tl.float32)
    written = tl.zeros([BLOCK, P], tl.float32)  # what is left of the gain of every token so far
    beyond = rest & (lane >= 0)[None, :]
    tl.store(keys + flat, written, mask=beyond)
    tl.store(local + flat, written, mask=beyond)
    if VARIANCE:
        tl.store(asked + flat, written, mask=beyond)
    for t in range(count):
        at = (token + t) * G + head
        key = tl.load(k + t * k_token + lane, mask=lane < K, other=0.0).to(tl.float32)
        this = tl.load(gain + at * K + lane, mask=lane < K, other=0.0)
        given = tl.load(grad_gain + at * K + lane, mask=lane < K, other=0.0).to(tl.float32)
        own = (given - tl.sum(given * this, 0) * key) / tl.load(scale + at)
        decay = _decay_of(log_decay, at, lane, K)
        reach *= decay
        written *= decay[None, :]
        by_key = tl.sum(written * key[None, :], 1)
        by_own = tl.sum(written * own[None, :], 1)
        written = tl.where((row == t)[:, None], this[None, :], written - by_key[:, None] * this[None, :])
        to = slot * (BLOCK * P) + t * P + lane
        tl.store(keys + to, reach * key)
        tl.store(local + to, reach * own)
        tl.store(coefficients + t * BLOCK + row, by_key)
        tl.store(coefficients + (BLOCK + t) * BLOCK + row, by_own)
        if VARIANCE:
            query = tl.load(q + t * q_token + lane, mask=lane < K, other=0.0).to(tl.float32)
            tl.store(coefficients + (2 * BLOCK + t) * BLOCK + row, tl.sum(written * query[None, :], 1))
            tl.store(asked + to, reach * query)
    tl.store(writes + flat, written)
    tl.store(edges + slot * P + lane, reach)
    tl.debug_barrier()  # what one thread stored another may load
    entered = tl.load(keys + flat)
    half = 0.5 * (tl.load(local + flat) - product(tl.load(coefficients + BLOCK * BLOCK + square), entered, SPLIT))
    tl.store(local + flat, half - product(tl.load(coefficients + turn), half, SPLIT))
    if VARIANCE:
        by_query = tl.load(coefficients + 2 * BLOCK * BLOCK + square)
        tl.store(asked + flat, tl.load(asked + flat) - product(by_query, entered, SPLIT))


@triton.jit(do_not_specialize=COUNTS)
def pull_back(
    q, k, process_noise, log_decay, gain, scale, grad_gain, grad_read, coefficients, exits, spreads,
    dk, dq, grad_obs, grad_process, changes, queries, noises, gathered, flows, table, length, tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    VARIANCE: tl.constexpr,
):  # fmt: skip
    index, head, _part = place_of(G, 1)
    token, count = block_of(table, index, length, tiles, BLOCK, WINDOW, PACKED)
    if count <= 0:
        return
    lane, row = tl.arange(0, P), tl.arange(0, BLOCK)
    slot = index.to(tl.int64) * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    tile = slot * (BLOCK * P) + lane
    square = slot * (BLOCK * P) + row[:, None] * P + lane[None, :]
    coefficients += slot * (3 * BLOCK * BLOCK) + row

    spread = tl.load(spreads + slot * P + lane)  # the diagonal of the adjoint
    leaving = tl.load(exits + square)  # the adjoint times what is left of every gain
    for back in range(count):
        t = count - 1 - back
        at = (token + t) * G + head
        key = tl.load(k + t * k_token + lane, mask=lane < K, other=0.0).to(tl.float32)
        this = tl.load(gain + at * K + lane, mask=lane < K, other=0.0)
        given = tl.load(grad_gain + at * K + lane, mask=lane < K, other=0.0).to(tl.float32)
        by_key = tl.load(coefficients + t * BLOCK)
        by_own = tl.load(coefficients + (BLOCK + t) * BLOCK)
        total = tl.load(scale + at)
        along = tl.sum(given * this, 0)
        own = (given - along * key) / total
        decay = _decay_of(log_decay, at, lane, K)
        if VARIANCE:
            query = tl.load(q + t * q_token + lane, mask=lane < K, other=0.0).to(tl.float32)
            weight = tl.load(grad_read + at).to(tl.float32)
            by_query = tl.load(coefficients + (2 * BLOCK + t) * BLOCK)
            leaving += (weight * by_query)[:, None] * query[None, :]
            spread += weight * query * query
        here = tl.sum(tl.where((row == t)[:, None], leaving, 0.0), 0)
        along_twice = tl.sum(here * this, 0)
        change = own - 2.0 * here + along_twice * key
        tl.store(changes + tile + t * P, change)
        tl.store(grad_obs + at, along_twice - along / total)
        spread += change * key
        tl.store(grad_process + at, tl.sum(spread, 0))
        noise = tl.load(process_noise + at).to(tl.float32)
        tl.store(flows + tile + t * P, noise * spread - 0.5 * given * this)
        spread *= decay * decay
        through = 0.5 * by_own - tl.sum(leaving * this[None, :], 1)
        leaving += through[:, None] * key[None, :] + (0.5 * by_key)[:, None] * own[None, :]
        leaving = tl.where((row < t)[:, None], leaving * decay[None, :], 0.0)
    tl.debug_barrier()  # what one thread stored another may load

    reach = tl.full([P], 1.0, tl.float32)
    noise = tl.zeros([P], tl.float32)
    written = tl.zeros([BLOCK, P], tl.float32)
    scales = tl.zeros([BLOCK], tl.float32)
    beyond = (row[:, None] >= count) & (lane >= 0)[None, :]
    tl.store(changes + square, written, mask=beyond)
    if VARIANCE:
        tl.store(queries + square, written, mask=beyond)
    for t in range(count):
        at = (token + t) * G + head
        this = tl.load(gain + at * K + lane, mask=lane < K, other=0.0)
        change = tl.load(changes + tile + t * P)
        decay = _decay_of(log_decay, at, lane, K)
        reach *= decay
        noise = decay * decay * noise + tl.load(process_noise + at).to(tl.float32)
        written *= decay[None, :]
        known = scales * tl.sum(written * change[None, :], 1)
        total = tl.load(scale + at)
        straight = tl.load(grad_obs + at) * total
        rest = straight * this + noise * change - tl.sum(written * known[:, None], 0)
        tl.store(dk + at * K + lane, rest, mask=lane < K)
        tl.store(changes + tile + t * P, reach * change)
        now = row == t
        written = tl.where(now[:, None], this[None, :], written)
        scales = tl.where(now, total, scales)
        if VARIANCE:
            query = tl.load(q + t * q_token + lane, mask=lane < K, other=0.0).to(tl.float32)
            twice = 2.0 * tl.load(grad_read + at).to(tl.float32)
            known = scales * tl.sum(written * query[None, :], 1)
            rest = noise * query - tl.sum(written * known[:, None], 0)
            tl.store(dq + at * K + lane, twice * rest, mask=lane < K)
            tl.store(queries + tile + t * P, twice * reach * query)
    tl.store(noises + square, written * tl.sqrt(scales)[:, None])
    tl.store(gathered + slot * P + lane, noise)


@triton.jit(do_not_specialize=COUNTS)
def finish(
    q, k, log_decay, kept, changes, queries, noises, gathered, edges, flows, balance, dk, dq, grad_decay, table,
    length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    window, head, _part = place_of(G, 1)
    window = window.to(tl.int64)
    token, count = tile_of(table, window, length, tiles, WINDOW, PACKED)
    PIECES: tl.constexpr = WINDOW // BLOCK
    i, j, row = tl.arange(0, P), tl.arange(0, P), tl.arange(0, BLOCK)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    turn, whole = row[None, :] * P + i[:, None], row[None, :] * P + j[:, None]
    state = tl.load(kept + (window * G + head) * (P * P) + i[:, None] * P + j[None, :])
    spare = tl.zeros([P], tl.float32)  # process noise that is not on its diagonal
    flow = tl.load(balance + (window * G + head) * P + i)
    blocks = tl.cdiv(count, BLOCK).to(tl.int32)
    for block in range(blocks):
        slot = (window * PIECES + block) * G + head
        base = slot * (BLOCK * P)
        t = block * BLOCK + row
        live = (t < count)[None, :] & (i < K)[:, None]
        first = (token + block * BLOCK) * G + head
        to = row[None, :] * (G * K) + i[:, None]
        logs = tl.load(log_decay + first * K + to, mask=live, other=0.0).to(tl.float32)
        reach = tl.exp(tl.cumsum(logs, 1))
        change, of_band = tl.load(changes + base + whole), tl.load(changes + base + turn)
        by_key = tl.load(dk + first * K + to, mask=live, other=0.0)
        by_key += reach * (product(state, change, SPLIT) + spare[:, None] * of_band)
        tl.store(dk + first * K + to, by_key, mask=live)
        if VARIANCE:
            query, of_band = tl.load(queries + base + whole), tl.load(queries + base + turn)
            by_query = tl.load(dq + first * K + to, mask=live, other=0.0)
            by_query += reach * (product(state, query, SPLIT) + spare[:, None] * of_band)
            tl.store(dq + first * K + to, by_query, mask=live)
        key = tl.load(k + block * (BLOCK * k_token) + row[None, :] * k_token + i[:, None], mask=live, other=0.0)
        change = tl.load(flows + base + turn, mask=live, other=0.0) - 0.5 * by_key * key.to(tl.float32)
        if VARIANCE:
            query = tl.load(q + block * (BLOCK * q_token) + row[None, :] * q_token + i[:, None], mask=live, other=0.0)
            change -= 0.5 * by_query * query.to(tl.float32)
        before = 2.0 * (flow[:, None] + tl.cumsum(change, 1) - change)
        flow += tl.sum(change, 1)
        tl.store(grad_decay + first * K + to, before, mask=live)
        if block + 1 < blocks:
            write, turned = tl.load(noises + base + row[:, None] * P + j[None, :]), tl.load(noises + base + turn)
            state = faded(state, edges + slot * P, i, j, 2) - product(turned, write, SPLIT)
            fade = tl.load(edges + slot * P + i)
            spare = spare * fade * fade + tl.load(gathered + slot * P + i)
