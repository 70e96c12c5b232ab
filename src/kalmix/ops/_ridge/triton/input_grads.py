"""`ridge` in Triton, backward: what the adjoints of H and U give keys, values, gains and decays; see `triton_backward`.

All tiles at once, in two launches: `pull_values` (by U), then `pull_keys` (by H), which adds to what the first left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._ridge.triton.solve import lags, load_block, load_numbers, tile_here
from kalmix.ops._shared.triton.tiles import LOOSE, load_per_token, load_rows, product, store_rows


@triton.jit
def spans(since, beyond, weights, slot, SIZE: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr):
    """Of a tile: A(t, s) `[s, t]`, 0 where t < s; gains; A(exit, s)."""
    t = tl.arange(0, SIZE)
    later = tl.where(t[:, None] <= t[None, :], 1.0, 0.0)
    weight, left = tl.full([SIZE], 1.0, tl.float32), tl.full([SIZE], 1.0, tl.float32)
    if DECAYS:
        later = tl.exp(tl.where(t[:, None] <= t[None, :], -lags(since, beyond, slot, SIZE), float("-inf")))
        high, low = load_numbers(since, slot, SIZE), load_numbers(beyond, slot, SIZE)
        end = slot * SIZE + SIZE - 1
        left = tl.exp((tl.load(since + end) - high) + (tl.load(beyond + end) - low))
    if GAINS:
        weight = load_numbers(weights, slot, SIZE)
    return later, weight, left


@triton.jit
def mixed(
    q, solution, share, q_token, G, count, lane, K: tl.constexpr, SIZE: tl.constexpr, MIXES: tl.constexpr,
):  # fmt: skip
    """What U is read with: mix x + (1 - mix) q."""
    reader = load_rows(solution, G * K, count, lane, K, SIZE)
    if MIXES:
        query = load_rows(q, q_token, count, lane, K, SIZE).to(tl.float32)
        reader = (query + share[:, None] * (reader.to(tl.float32) - query)).to(solution.dtype.element_ty)
    return reader


@triton.jit(do_not_specialize=LOOSE)
def pull_values(
    q, k, v, since, beyond, across, gains, mix, crosses, solution, to_mean, reads, adjoints, to_k, to_v, to_gain,
    to_decay, table, length, tiles, q_token, q_head, k_token, k_head, v_token, v_head, m_token, m_head, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, GAINS: tl.constexpr, MIXES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv of a tile's tokens, and what dk, dgain and the log-decay's gradient have by U."""
    KIND: tl.constexpr = adjoints.dtype.element_ty
    NARROW: tl.constexpr = min(P, BLOCK)
    head, token, count, row, slot = tile_here(table, length, tiles, G, SIZE, PACKED)
    if count <= 0:
        return
    t, lane = tl.arange(0, SIZE), tl.arange(0, P)
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    v += token * v_token + head * v_head
    to_mean += token * m_token + head * m_head
    solution += row * K
    crosses += slot * K * V
    adjoints += slot * K * V
    far = 0.0
    later, weight, left = spans(since, beyond, gains, slot, SIZE, DECAYS, GAINS)
    share = tl.full([SIZE], 1.0, tl.float32)
    if MIXES:
        share = load_per_token(mix + row, count, G, SIZE)
    key = load_rows(k, k_token, count, lane, K, SIZE)
    reader = mixed(q, solution, share, q_token, G, count, lane, K, SIZE, MIXES)
    score = product(key, tl.trans(reader), PRECISION) * later
    asked = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        grad = load_rows(to_mean, m_token, count, column, V, SIZE)
        asked = product(load_rows(v, v_token, count, column, V, SIZE), tl.trans(grad), PRECISION, asked)
        found = product(key, load_block(adjoints, lane, column, K, V), PRECISION) * left[:, None]
        found = product(score.to(KIND), grad, PRECISION, found)
        store_rows(to_v + row * V, G * V, count, column, found * weight[:, None], V, SIZE)
        if DECAYS:
            held = load_block(crosses, lane, column, K, V).to(tl.float32)
            held *= load_block(adjoints, lane, column, K, V).to(tl.float32)
            far += tl.sum(tl.sum(held, 1), 0)
    decay = tl.zeros([SIZE], tl.float32)
    if DECAYS:
        pairs = tl.where(t[:, None] < t[None, :], asked * score * weight[:, None], 0.0)
        until = tl.where(t[:, None] >= t[None, :], 1.0, 0.0).to(KIND)
        above = pairs.to(KIND)
        pairs = product((pairs - above.to(tl.float32)).to(KIND), until, PRECISION, product(above, until, PRECISION))
        decay = tl.sum(tl.where(t[:, None] < t[None, :], pairs, 0.0), 0)
    asked = (asked * later).to(KIND)
    by_exit, said = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for start in range(0, K, NARROW):
        part = start + tl.arange(0, NARROW)
        turned = tl.zeros([SIZE, NARROW], tl.float32)
        for begin in range(0, V, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            block = load_block(adjoints, part, column, K, V)
            turned = product(load_rows(v, v_token, count, column, V, SIZE), tl.trans(block), PRECISION, turned)
        turned *= left[:, None]
        wide = load_rows(k, k_token, count, part, K, SIZE).to(tl.float32)
        by_exit += tl.sum(turned * wide, 1)
        turned = product(asked, mixed(q, solution, share, q_token, G, count, part, K, SIZE, MIXES), PRECISION, turned)
        said += tl.sum(turned * wide, 1)
        store_rows(to_k + row * K, G * K, count, part, weight[:, None] * turned, K, SIZE)
    if GAINS:
        tl.store(to_gain + row + t * G, said, mask=t < count)
    if DECAYS:
        by_entry = load_numbers(reads, slot, SIZE)
        by_exit *= weight
        decay += tl.cumsum(by_entry, 0, reverse=True) + (tl.cumsum(by_exit, 0) - by_exit)
        tl.store(to_decay + row + t * G, decay + tl.load(across + slot) * far, mask=t < count)


@triton.jit(do_not_specialize=LOOSE)
def pull_keys(
    k, since, beyond, entering, across, gains, grams, norms, solution, adjoint, spreads, owns, adjoints,
    to_k, to_gain, to_decay, table, length, tiles, k_token, k_head, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, GAINS: tl.constexpr, ADAPTIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dgain and the log-decay's gradient of a tile's tokens, what they have by U given."""
    KIND: tl.constexpr = adjoint.dtype.element_ty
    NARROW: tl.constexpr = min(P, BLOCK)
    head, token, count, row, slot = tile_here(table, length, tiles, G, SIZE, PACKED)
    if count <= 0:
        return
    t, lane = tl.arange(0, SIZE), tl.arange(0, P)
    k += token * k_token + head // SHARE * k_head
    solution += row * K
    adjoint += row * K
    to_k += row * K
    grams += slot * K * K
    adjoints += slot * K * K
    far = 0.0
    later, weight, left = spans(since, beyond, gains, slot, SIZE, DECAYS, GAINS)
    fade = load_numbers(entering, slot, SIZE) if DECAYS else tl.full([SIZE], 1.0, tl.float32)
    key = load_rows(k, k_token, count, lane, K, SIZE)
    x = load_rows(solution, G * K, count, lane, K, SIZE)
    y = load_rows(adjoint, G * K, count, lane, K, SIZE)
    by_x = product(key, tl.trans(x), PRECISION)
    by_y = product(key, tl.trans(y), PRECISION)
    own = tl.sum(later * by_x * by_y * weight[:, None], 0)
    by_x, by_y = (-0.5 * later * by_x).to(KIND), (-0.5 * later * by_y).to(KIND)
    both, grown = by_x, fade
    if ADAPTIVE:
        spread = load_numbers(spreads, slot, SIZE)
        pairs = product((later * spread[None, :]).to(KIND), tl.trans(later.to(KIND)), PRECISION)
        grown = tl.sum(tl.where(t[None, :] == 0, pairs * fade[None, :], 0.0), 1)  # to the entry, by way of token 0
        both = (pairs * product(key, tl.trans(key), PRECISION) * weight[None, :]).to(KIND)
    leaving, said = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for start in range(0, K, NARROW):
        part = start + tl.arange(0, NARROW)
        entry = load_block(grams, lane, part, K, K)
        if DECAYS:
            held = load_block(adjoints, lane, part, K, K).to(tl.float32)
            held *= load_block(grams, lane, part, K, K).to(tl.float32)
            far += tl.sum(tl.sum(held, 1), 0)
        turned = product(key, load_block(adjoints, lane, part, K, K), PRECISION) * left[:, None]
        wide = load_rows(k, k_token, count, part, K, SIZE).to(tl.float32)
        leaving += tl.sum(turned * wide, 1)
        if ADAPTIVE:
            turned += grown[:, None] * product(key, entry, PRECISION)
            turned = product(both, load_rows(k, k_token, count, part, K, SIZE), PRECISION, turned)
        turned = product(by_y, load_rows(solution, G * K, count, part, K, SIZE), PRECISION, turned)
        turned = product(by_x, load_rows(adjoint, G * K, count, part, K, SIZE), PRECISION, turned)
        said += tl.sum(turned * wide, 1)
        turned = 2.0 * weight[:, None] * turned + load_rows(to_k, G * K, count, part, K, SIZE).to(tl.float32)
        store_rows(to_k, G * K, count, part, turned, K, SIZE)
    if GAINS:
        tl.store(to_gain + row + t * G, said + load_per_token(to_gain + row, count, G, SIZE), mask=t < count)
    if DECAYS:
        after = 0.0 - own - load_numbers(owns, slot, SIZE) - weight * said
        if ADAPTIVE:
            norm = load_numbers(norms, slot, SIZE)
            after += load_numbers(spreads, slot, SIZE) * norm * norm
        found = tl.cumsum(after, 0, reverse=True) + load_per_token(to_decay + row, count, G, SIZE)
        found += tl.sum(weight * leaving, 0) + tl.load(across + slot) * far
        tl.store(to_decay + row + t * G, found, mask=t < count)
