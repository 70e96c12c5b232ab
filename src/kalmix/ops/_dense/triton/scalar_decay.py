"""`dense` in Triton where decays are one a head, or none: blocks and windows of tokens at once, by products.

Between two tokens s <= t then lies a number, D[t, s], and what the tokens of a block do to each other is a matrix. With
c the gains, s their innovation variances and S[t, s] = D[t, s] k_t'c_s below the diagonal, the innovation covariance of
a block is (I + S) diag(s) (I + S)' = L L'. The gains are made of what its rows leave, by L^-1.

Backward, B = I - (I + S)^-1 is what k_t finds of what is left of the gain of token s. With R and O the same of q_t and
w_t = (dc_t - (dc_t'c_t) k_t) / s_t, W what is left of the gains at the exit of the block, Q the adjoint of the
covariance there and r the variances that were read, two gains meet in the adjoint at the later of their tokens as

    M = W Q W' + (O'B + B'O) / 2 + R' diag(dr) R

so that m_t = M[t, t], and with sums over the tokens t' after t, the last also over t itself,

    du_t = w_t - 2 A(exit, t) Q W_t + m_t k_t + sum D[t', t] ((2 M - O)[t', t] k_t' - B[t', t] w_t')
           - 2 sum D[t', t] R[t', t] dr_t' q_t'

One warp has a block, some keys at a time, and four have a window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._dense.triton.parts import COUNTS, block_of, product
from kalmix.ops._shared.triton.decay_products import between, between_transposed, elapsed
from kalmix.ops._shared.triton.tiles import (
    levels_of,
    load_columns,
    load_per_token,
    load_rows,
    place_of,
    store_rows,
    tile_of,
)

# Keys of its tokens that a program takes at a time: the fastest of 32, 64 and 128 on an H200.
KEYS = {"prepare": 128, "gains": 32, "gather": 64, "pull_back": 64, "finish": 128}


def options(stage: str, kind: int, lanes: int, parts: int) -> dict[str, int]:
    """How a stage is compiled."""
    found = {"DECAY": kind, "SPLIT": parts, "CHUNK": min(lanes, KEYS[stage]), "num_stages": 1}
    found |= {"num_warps": 4 if stage == "finish" else 1}
    return found | ({"maxnreg": 128} if stage == "gains" else {})  # so that a multiprocessor has 16 at once


@triton.jit
def _elapsed(log_decay, token, count, head, G, SIZE: tl.constexpr, DECAY: tl.constexpr):
    """Log-decay from a tile's entry to after each token, and over all of it, float64."""
    if DECAY:
        since, total = elapsed(log_decay, token, count, head, G, SIZE)
    else:
        since = tl.zeros([SIZE], tl.float64)
        total = tl.sum(since, 0)
    return since, total


@triton.jit
def _fade(logs):
    return tl.exp(logs.to(tl.float32))


@triton.jit
def _same(SIZE: tl.constexpr):
    """`[t, s]`, whether they are one token."""
    t = tl.arange(0, SIZE)
    return t[:, None] == t[None, :]


@triton.jit
def _earlier(SIZE: tl.constexpr):
    """`[t, s]`, whether s comes before t."""
    t = tl.arange(0, SIZE)
    return t[:, None] > t[None, :]


@triton.jit
def _diagonal(M, SIZE: tl.constexpr):
    return tl.sum(tl.where(_same(SIZE), M, 0.0), 1)


@triton.jit
def _gathered(decays, noise):
    """Process noise from a tile's entry to after each token."""
    return tl.sum(decays * decays * noise[None, :], 1)


@triton.jit
def _met_by_both(since, decays, gathered, SIZE: tl.constexpr):
    """`[t, s]`, the process noise that two tokens both met, as it comes to the later."""
    t = tl.arange(0, SIZE)
    after = between_transposed(since, SIZE) * gathered[:, None]
    return tl.where(t[:, None] < t[None, :], after, decays * gathered[None, :])


@triton.jit
def _found_before(S, SIZE: tl.constexpr, SPLIT: tl.constexpr):
    """I - (I + S)^-1 of what is below the diagonal of S: inverses of blocks of two from those of their halves."""
    t, s = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    apart = tl.where(t > s, t ^ s, 0)  # halves of a block of 2 h meet where h is its highest bit
    inverse = tl.where(t == s, 1.0, tl.where(apart == 1, -S, 0.0))
    for level in tl.static_range(1, levels_of(SIZE)):
        corner = tl.where(apart >> level == 1, S, 0.0)
        inverse -= product(product(inverse, corner, SPLIT), inverse, SPLIT)
    return tl.where(t > s, -inverse, 0.0)


@triton.jit(do_not_specialize=COUNTS)
def prepare(
    q, k, obs_noise, process_noise, log_decay, keys, queries, noises, innovations, edges, table, length, tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index, head, _part = place_of(G, 1)
    token, count = block_of(table, index, length, tiles, BLOCK, WINDOW, PACKED)
    if count <= 0:
        return
    t, slot, row = tl.arange(0, BLOCK), index.to(tl.int64) * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    since, total = _elapsed(log_decay, token, count, head, G, BLOCK, DECAY)
    decays, reach = between(since, BLOCK), _fade(since)
    noise = _gathered(decays, load_per_token(process_noise + row, count, G, BLOCK))
    left = noise * _fade(total - since)
    C = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, P, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        flat = slot * (BLOCK * P) + t[:, None] * P + lane[None, :]
        key = load_rows(k, k_token, count, lane, K, BLOCK)
        C += product(key, load_columns(k, k_token, count, lane, K, BLOCK), SPLIT)
        key = key.to(tl.float32)
        tl.store(keys + flat, reach[:, None] * key)
        tl.store(noises + flat, left[:, None] * key)
        if VARIANCE:
            query = load_rows(q, q_token, count, lane, K, BLOCK).to(tl.float32)
            tl.store(queries + flat, reach[:, None] * query)
        edge = edges + slot * 2 * P + lane
        tl.store(edge, tl.zeros([CHUNK], tl.float32) + _fade(total))
        tl.store(edge + P, tl.zeros([CHUNK], tl.float32) + tl.sum(tl.where(t == BLOCK - 1, noise, 0.0), 0))
    observed = tl.load(obs_noise + row + t * G, mask=t < count, other=1.0).to(tl.float32)
    C = _met_by_both(since, decays, noise, BLOCK) * C + tl.where(_same(BLOCK), observed[:, None], 0.0)
    tl.store(innovations + slot * (BLOCK * BLOCK) + t[:, None] * BLOCK + t[None, :], C)


@triton.jit(do_not_specialize=COUNTS)
def gains(
    q, k, obs_noise, process_noise, log_decay, innovations, projected, asked, gain, rounded, scale, read, table, length,
    tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index, head, _part = place_of(G, 1)
    token, count = block_of(table, index, length, tiles, BLOCK, WINDOW, PACKED)
    if count <= 0:
        return
    t, slot, row = tl.arange(0, BLOCK), index.to(tl.int64) * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    since, _ = _elapsed(log_decay, token, count, head, G, BLOCK, DECAY)
    decays, reach = between(since, BLOCK), _fade(since)
    noise = _gathered(decays, load_per_token(process_noise + row, count, G, BLOCK))
    inverse = tl.load(innovations + slot * (BLOCK * BLOCK) + t[:, None] * BLOCK + t[None, :])
    root = _diagonal(inverse, BLOCK)
    inverse = tl.where(_earlier(BLOCK), inverse / root[:, None], 0.0)
    observed = tl.load(obs_noise + row + t * G, mask=t < count, other=1.0).to(tl.float32)
    total = tl.maximum(1.0 / (root * root), observed)
    tl.store(scale + row + t * G, total, mask=t < count)
    noisy = inverse * decays * noise[None, :]
    known = tl.zeros([BLOCK, BLOCK], tl.float32)
    answer = tl.zeros([BLOCK], tl.float32)
    for start in range(0, P, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        flat = slot * (BLOCK * P) + t[:, None] * P + lane[None, :]
        key, seen = load_rows(k, k_token, count, lane, K, BLOCK), tl.load(projected + flat)
        write = reach[:, None] * (seen + product(inverse, seen, SPLIT))
        write = (write + noise[:, None] * key.to(tl.float32) + product(noisy, key, SPLIT)) / total[:, None]
        store_rows(gain + row * K, G * K, count, lane, write, K, BLOCK)
        if gain.dtype != rounded.dtype:
            store_rows(rounded + row * K, G * K, count, lane, write, K, BLOCK)
        if VARIANCE:
            query = load_rows(q, q_token, count, lane, K, BLOCK)
            known += product(query, tl.trans(write), SPLIT)
            query = query.to(tl.float32)
            answer += tl.sum(query * (reach[:, None] * tl.load(asked + flat) + noise[:, None] * query), 1)
    if VARIANCE:
        known *= decays
        answer -= tl.sum(known * known * tl.where(t < count, total, 0.0)[None, :], 1)
        tl.store(read + row + t * G, tl.maximum(answer, 0.0), mask=t < count)


@triton.jit(do_not_specialize=COUNTS)
def gather(
    q, k, log_decay, gain, scale, grad_gain, keys, writes, local, asked, coefficients, edges, table, length, tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index, head, _part = place_of(G, 1)
    token, count = block_of(table, index, length, tiles, BLOCK, WINDOW, PACKED)
    if count <= 0:
        return
    t, slot, row = tl.arange(0, BLOCK), index.to(tl.int64) * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    gain += row * K
    grad_gain += row * K
    by_key = tl.zeros([BLOCK, BLOCK], tl.float32)
    by_own = tl.zeros([BLOCK, BLOCK], tl.float32)
    by_query = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, P, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        write = load_columns(gain, G * K, count, lane, K, BLOCK)
        by_key += product(load_rows(k, k_token, count, lane, K, BLOCK), write, SPLIT)
        by_own += product(load_rows(grad_gain, G * K, count, lane, K, BLOCK), write, SPLIT)
        if VARIANCE:
            by_query += product(load_rows(q, q_token, count, lane, K, BLOCK), write, SPLIT)
    since, total = _elapsed(log_decay, token, count, head, G, BLOCK, DECAY)
    decays, reach, rest = between(since, BLOCK), _fade(since), _fade(total - since)
    inverse = 1.0 / tl.load(scale + row + t * G, mask=t < count, other=1.0)
    along = _diagonal(by_own, BLOCK)
    by_key *= decays
    by_own = tl.where(_earlier(BLOCK), (decays * by_own - along[:, None] * by_key) * inverse[:, None], 0.0)
    by_key = _found_before(by_key, BLOCK, SPLIT)
    by_own -= product(by_own, by_key, SPLIT)
    square = coefficients + slot * (3 * BLOCK * BLOCK) + t[:, None] * BLOCK + t[None, :]
    tl.store(square, by_key)
    tl.store(square + BLOCK * BLOCK, by_own)
    if VARIANCE:
        by_query *= decays
        by_query -= product(by_query, by_key, SPLIT)
        tl.store(square + 2 * BLOCK * BLOCK, by_query)
    later, by_entered = tl.trans(by_key), by_own * reach[None, :]
    for start in range(0, P, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        flat = slot * (BLOCK * P) + t[:, None] * P + lane[None, :]
        write = rest[:, None] * load_rows(gain, G * K, count, lane, K, BLOCK)
        tl.store(writes + flat, write - product(later, write, SPLIT))
        key = load_rows(k, k_token, count, lane, K, BLOCK)
        half = product(by_entered, key, SPLIT)
        if VARIANCE:
            query = load_rows(q, q_token, count, lane, K, BLOCK).to(tl.float32)
            query = reach[:, None] * query - product(by_query * reach[None, :], key, SPLIT)
            tl.store(asked + flat, query)
        key = key.to(tl.float32)
        tl.store(keys + flat, reach[:, None] * key)
        own = load_rows(grad_gain, G * K, count, lane, K, BLOCK) - along[:, None] * key
        half = 0.5 * ((reach * inverse)[:, None] * own - half)
        tl.store(local + flat, half - product(later, half, SPLIT))
        tl.store(edges + slot * P + lane, tl.zeros([CHUNK], tl.float32) + _fade(total))


@triton.jit(do_not_specialize=COUNTS)
def pull_back(
    q, k, process_noise, log_decay, gain, scale, grad_gain, grad_read, coefficients, exits, spreads,
    grad_obs, grad_process, grad_decay, changes, table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """du; gradients of the noises, and of a log-decay the share that its token has without the covariance."""
    index, head, _part = place_of(G, 1)
    token, count = block_of(table, index, length, tiles, BLOCK, WINDOW, PACKED)
    if count <= 0:
        return
    t, slot, row = tl.arange(0, BLOCK), index.to(tl.int64) * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    gain += row * K
    grad_gain += row * K
    met = tl.zeros([BLOCK, BLOCK], tl.float32)
    along = tl.zeros([BLOCK], tl.float32)
    for start in range(0, P, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        write = load_rows(gain, G * K, count, lane, K, BLOCK)
        along += tl.sum(write * load_rows(grad_gain, G * K, count, lane, K, BLOCK), 1)
        leaving = tl.load(exits + slot * (BLOCK * P) + t[None, :] * P + lane[:, None])
        met += product(write, leaving, SPLIT)
    since, total = _elapsed(log_decay, token, count, head, G, BLOCK, DECAY)
    decays, rest = between(since, BLOCK), _fade(total - since)
    square = coefficients + slot * (3 * BLOCK * BLOCK) + t[:, None] * BLOCK + t[None, :]
    by_key, by_own = tl.load(square), tl.load(square + BLOCK * BLOCK)
    both, met = product(tl.trans(by_own), by_key, SPLIT), rest[:, None] * met
    met += 0.5 * (both + tl.trans(both)) - product(tl.trans(by_key), met, SPLIT)
    to_query = tl.zeros([BLOCK, BLOCK], tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    if VARIANCE:
        weight = load_per_token(grad_read + row, count, G, BLOCK)
        by_query = tl.load(square + 2 * BLOCK * BLOCK)
        to_query = weight[:, None] * by_query
        met += product(tl.trans(by_query), to_query, SPLIT)
        to_query = tl.trans(2.0 * decays * to_query)
    straight = _diagonal(met, BLOCK)
    inverse = 1.0 / tl.load(scale + row + t * G, mask=t < count, other=1.0)
    tl.store(grad_obs + row + t * G, straight - along * inverse, mask=t < count)
    to_key = tl.trans(tl.where(_earlier(BLOCK), decays * (2.0 * met - by_own), 0.0))
    to_own = tl.trans(decays * by_key)
    came = tl.zeros([BLOCK], tl.float32)  # to the trace of the adjoint at each token, and what leaves the block
    trace = tl.zeros([1], tl.float32)
    for start in range(0, P, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        flat = slot * (BLOCK * P) + t[:, None] * P + lane[None, :]
        key = load_rows(k, k_token, count, lane, K, BLOCK)
        change = product(to_key, key, SPLIT)
        key = key.to(tl.float32)
        own = (load_rows(grad_gain, G * K, count, lane, K, BLOCK) - along[:, None] * key) * inverse[:, None]
        change -= product(to_own, own, SPLIT)
        change += own + straight[:, None] * key - (2.0 * rest)[:, None] * tl.load(exits + flat)
        if VARIANCE:
            query = load_rows(q, q_token, count, lane, K, BLOCK)
            change -= product(to_query, query, SPLIT)
            query = query.to(tl.float32)
            came += weight * tl.sum(query * query, 1)
        tl.store(changes + flat, change)
        came += tl.sum(change * key, 1)
        trace += tl.sum(tl.load(spreads + slot * P + lane), 0)
    came = tl.sum(decays * decays * came[:, None], 0) + rest * rest * trace
    tl.store(grad_process + row + t * G, came, mask=t < count)
    if DECAY:
        came *= load_per_token(process_noise + row, count, G, BLOCK)
        tl.store(grad_decay + row + t * G, came - 0.5 * along, mask=t < count)


@triton.jit
def _through(
    x, count, state, writes, G, K: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Vectors of a window's tokens, which lie at `x`, times a covariance and, `[t, s]`, times gains."""
    t, j = tl.arange(0, SIZE), tl.arange(0, P)
    seen = tl.zeros([SIZE, P], tl.float32)
    found = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, P, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        vectors = tl.load(x[:, None] + lane[None, :], mask=(t < count)[:, None] & (lane < K)[None, :], other=0.0)
        found += product(vectors, load_columns(writes, G * K, count, lane, K, SIZE), SPLIT)
        seen += product(vectors, tl.load(state + lane[:, None] * P + j[None, :]), SPLIT)
    return seen, found


@triton.jit
def add_rows(base, stride, count, column, x, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    held = load_rows(base, stride, count, column, WIDTH, SIZE).to(tl.float32)
    store_rows(base, stride, count, column, held + x, WIDTH, SIZE)


@triton.jit(do_not_specialize=COUNTS)
def finish(
    q, k, process_noise, log_decay, gain, scale, grad_read, kept, changes, balance, grad_obs, dk, dq, grad_decay, table,
    length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What a window's tokens find in the covariance at its entry, less what earlier ones took, comes to dk, dq."""
    window, head, _part = place_of(G, 1)
    window = window.to(tl.int64)
    token, count = tile_of(table, window, length, tiles, WINDOW, PACKED)
    if count <= 0:
        return
    t, lane, here, row = tl.arange(0, WINDOW), tl.arange(0, P), window * G + head, token * G + head
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    slot = (window * (WINDOW // BLOCK) + t // BLOCK) * G + head
    changes += slot * (BLOCK * P) + t % BLOCK * P
    kept += here * (P * P)
    gain += row * K
    seen, found = _through(changes, count, kept, gain, G, K, P, WINDOW, SPLIT, CHUNK)
    since, _ = _elapsed(log_decay, token, count, head, G, WINDOW, DECAY)
    decays, reach = between(since, WINDOW), _fade(since)
    noise = _gathered(decays, load_per_token(process_noise + row, count, G, WINDOW))
    total = load_per_token(scale + row, count, G, WINDOW)
    taken = decays * decays * total[None, :]
    straight = total * load_per_token(grad_obs + row, count, G, WINDOW)
    found = tl.where(_same(WINDOW), straight[:, None], -taken * found)
    seen = (reach * reach)[:, None] * seen + product(found, load_rows(gain, G * K, count, lane, K, WINDOW), SPLIT)
    seen += noise[:, None] * tl.load(changes[:, None] + lane[None, :], mask=(t < count)[:, None], other=0.0)
    add_rows(dk + row * K, G * K, count, lane, seen, K, WINDOW)
    moved = tl.sum(seen * load_rows(k, k_token, count, lane, K, WINDOW).to(tl.float32), 1)
    if VARIANCE:
        seen, found = _through(q + t * q_token, count, kept, gain, G, K, P, WINDOW, SPLIT, CHUNK)
        query = load_rows(q, q_token, count, lane, K, WINDOW).to(tl.float32)
        found = product(-taken * found, load_rows(gain, G * K, count, lane, K, WINDOW), SPLIT)
        seen = (reach * reach)[:, None] * seen + noise[:, None] * query + found
        seen *= 2.0 * load_per_token(grad_read + row, count, G, WINDOW)[:, None]
        add_rows(dq + row * K, G * K, count, lane, seen, K, WINDOW)
        moved += tl.sum(seen * query, 1)
    if DECAY:
        change = load_per_token(grad_decay + row, count, G, WINDOW) - 0.5 * moved
        before = 2.0 * (tl.sum(tl.load(balance + here * P + lane), 0) + tl.cumsum(change, 0) - change)
        tl.store(grad_decay + row + t * G, before, mask=t < count)
