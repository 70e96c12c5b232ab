r"""`ridge` in Triton, backward: one more solve a token, and the adjoints of H and U from tile to tile.

With dx~ the gradient of what U is read with, U_t d(mean)_t, and y = S^{-1} dx, Lemma 2 and equation 13 of Gated
KalmaNet give what a token's solution says of its H,

    dH_t = -(y_t x_t' + x_t y_t') / 2 + w_t H_t,     w_t = -a x_t'y_t / ||H_t||_F, 0 for a fixed ridge

and the adjoint of H after a token is that of all later ones, decayed: Lambda_s = sum_{t >= s} A(t, s) dH_t; so is that
of U, Mu_s, with dU_t = x~_t d(mean)_t'. Then

    dk_s = g_s (2 Lambda_s k_s + Mu_s v_s),   dv_s = g_s Mu_s'k_s,   dg_s = k_s'(Lambda_s k_s + Mu_s v_s)

and the log-decay's gradient is <Lambda_t, H_t> less what the token wrote, gathered inside a tile from its end; U's
share is a sum over the pairs of tokens that a decay lies between. There are four launches, all tiles at once but for
`retreat`, the adjoints from tile to tile: `resolve` (dq, y and w), `retreat`, `pull_values` (by U) and `pull_keys`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.primitives.triton_filter import strides
from kalmix.kernels.primitives.triton_tiles import (
    LOOSE,
    load_columns,
    load_per_token,
    load_rows,
    product,
    rows,
    run_of,
    store_rows,
    tile_of,
)
from kalmix.kernels.ridge.triton_solve import (
    along,
    block_of,
    lags,
    load_block,
    load_numbers,
    paced,
    paths,
    shape_of,
    solve,
    store_block,
    store_numbers,
)
from kalmix.solvers import NOTHING


@triton.jit(do_not_specialize=[*LOOSE, "iterations"])
def resolve(
    q, k, v, since, beyond, entering, gains, mix, grams, crosses, norms, solution, to_mean, to_read, adjoint,
    to_q, to_mix, spreads, reads, owns, written, carried, table, length, tiles, iterations, level,
    q_token, q_head, k_token, k_head, v_token, v_head, m_token, m_head, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, GAINS: tl.constexpr, MIXES: tl.constexpr, READS: tl.constexpr, ADAPTIVE: tl.constexpr,
    CONJUGATE: tl.constexpr, NOTHING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dmix, y and w of a tile's tokens; what H_0 and U_0 gave; how w H adds up, at the entry and on each token."""
    KIND: tl.constexpr = grams.dtype.element_ty
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    if count <= 0:
        return
    row, slot = token * G + head, index.to(tl.int64) * G + head
    t, lane = tl.arange(0, SIZE), tl.arange(0, P)
    q += token * q_token + head // SHARE * q_head
    solution += row * K
    to_q += row * K
    key = load_rows(k + token * k_token + head // SHARE * k_head, k_token, count, lane, K, SIZE)
    decays, weight, fade = paths(since, beyond, entering, gains, slot, SIZE, DECAYS, GAINS)
    weights = decays * weight[None, :]

    given, asked = tl.zeros([SIZE, P], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        grad = load_rows(to_mean + token * m_token + head * m_head, m_token, count, column, V, SIZE)
        value = load_rows(v + token * v_token + head * v_head, v_token, count, column, V, SIZE)
        cross = load_block(crosses + slot * K * V, lane, column, K, V)
        given = product(grad, tl.trans(cross), PRECISION, given)
        asked = product(grad, tl.trans(value), PRECISION, asked)
    given *= fade[:, None]
    x = load_rows(solution, G * K, count, lane, K, SIZE)
    share = tl.full([SIZE], 1.0, tl.float32)
    if MIXES:
        share = load_per_token(mix + row, count, G, SIZE)
        query = load_rows(q, q_token, count, lane, K, SIZE)
    if DECAYS:
        said = along(given, x, PRECISION)
        if MIXES:
            by_query = along(given, query, PRECISION)
            said = by_query + share * (said - by_query)
        store_numbers(reads, slot, said)
    given = product((asked * weights).to(KIND), key, PRECISION, given)
    kept = (1.0 - share)[:, None] * given
    if MIXES:
        said = along(given, x, PRECISION) - along(given, query, PRECISION)
        tl.store(to_mix + row + t * G, said, mask=t < count)
        given *= share[:, None]
    if READS:
        said = load_per_token(to_read + row, count, G, SIZE)[:, None]
        given += said * load_rows(q, q_token, count, lane, K, SIZE).to(tl.float32)
        kept += said * load_rows(solution, G * K, count, lane, K, SIZE).to(tl.float32)
    if MIXES or READS:
        store_rows(to_q, G * K, count, lane, kept, K, SIZE)

    norm = load_numbers(norms, slot, SIZE)
    gram = load_block(grams + slot * K * K, lane, lane, K, K)
    y, weights = solve(
        given, gram, key, weights, fade, norm, level, iterations, ADAPTIVE, CONJUGATE, NOTHING, PRECISION
    )
    store_rows(adjoint + row * K, G * K, count, lane, y, K, SIZE)
    x = load_rows(solution, G * K, count, lane, K, SIZE)
    if DECAYS:
        own = along(product(y.to(KIND), gram, PRECISION), x, PRECISION)
        store_numbers(owns, slot, own * fade)
    if ADAPTIVE:
        spread = -level * along(y, x, PRECISION) / tl.where(norm > NOTHING, norm, 1.0)
        store_numbers(spreads, slot, spread)
        store_numbers(written, slot, tl.sum(weights * (fade * spread)[:, None], 0))
        tl.store(carried + slot, tl.sum(fade * fade * spread, 0))
    if MIXES or READS:
        tl.debug_barrier()
        y += load_rows(to_q, G * K, count, lane, K, SIZE).to(tl.float32)
    store_rows(to_q, G * K, count, lane, y, K, SIZE)


@triton.jit(do_not_specialize=LOOSE)
def retreat(
    q, k, mix, grams, solution, adjoint, to_mean, entering, across, written, carried, gram_adjoints, cross_adjoints,
    to_gram, to_cross, to_gram_prior, to_cross_prior, runs, length, tiles, q_token, q_head, k_token, k_head,
    m_token, m_head, gram_n, gram_g, gram_i, gram_j, cross_n, cross_g, cross_i, cross_j, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VALUES: tl.constexpr, STRIPS: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, MIXES: tl.constexpr, ADAPTIVE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of Lambda, or of Mu, of one sequence and head, from its end, noted as it is after every tile."""
    KIND: tl.constexpr = gram_adjoints.dtype.element_ty
    sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, P)
    tile, token, tokens = run_of(runs, sequence, length, tiles, PACKED)
    last = tl.cdiv(tokens, SIZE) - 1
    q += head // SHARE * q_head
    k += head // SHARE * k_head
    if part < STRIPS:
        column = part * VALUES + tl.arange(0, VALUES)
        inside = (lane < K)[:, None] & (column < K)[None, :]
        to_gram += sequence * gram_n + head * gram_g
        state = tl.load(to_gram + lane[:, None] * gram_i + column[None, :] * gram_j, mask=inside, other=0.0)
        for step in tl.range(0, last + 1, num_stages=1):
            i = last - step
            count = tl.minimum(tokens - i * SIZE, SIZE)
            at, slot = token + i * SIZE, (tile + i) * G + head
            store_block(gram_adjoints + slot * K * K, lane, column, state, K, K)
            half = tl.full([SIZE, 1], -0.5, tl.float32)
            if DECAYS:
                state *= tl.load(across + slot)
                half *= load_numbers(entering, slot, SIZE)[:, None]
            y, x = adjoint + (at * G + head) * K, solution + (at * G + head) * K
            right = (load_rows(x, G * K, count, column, K, SIZE).to(tl.float32) * half).to(KIND)
            state = product(load_columns(y, G * K, count, lane, K, SIZE), right, PRECISION, state)
            right = (load_rows(y, G * K, count, column, K, SIZE).to(tl.float32) * half).to(KIND)
            state = product(load_columns(x, G * K, count, lane, K, SIZE), right, PRECISION, state)
            if ADAPTIVE:
                weight = load_numbers(written, slot, SIZE)[:, None]
                right = (load_rows(k + at * k_token, k_token, count, column, K, SIZE).to(tl.float32) * weight).to(KIND)
                state = product(load_columns(k + at * k_token, k_token, count, lane, K, SIZE), right, PRECISION, state)
                entry = load_block(grams + slot * K * K, lane, column, K, K)
                state += tl.load(carried + slot) * entry.to(tl.float32)
        store_block(to_gram_prior + (sequence * G + head) * K * K, lane, column, state, K, K)
    else:
        column = (part - STRIPS) * VALUES + tl.arange(0, VALUES)
        inside = (lane < K)[:, None] & (column < V)[None, :]
        to_cross += sequence * cross_n + head * cross_g
        state = tl.load(to_cross + lane[:, None] * cross_i + column[None, :] * cross_j, mask=inside, other=0.0)
        for step in tl.range(0, last + 1, num_stages=STAGES):
            i = last - step
            count = tl.minimum(tokens - i * SIZE, SIZE)
            at, slot = token + i * SIZE, (tile + i) * G + head
            store_block(cross_adjoints + slot * K * V, lane, column, state, K, V)
            right = load_rows(to_mean + at * m_token + head * m_head, m_token, count, column, V, SIZE)
            if DECAYS:
                state *= tl.load(across + slot)
                fade = load_numbers(entering, slot, SIZE)[:, None]
                right = (right.to(tl.float32) * fade).to(KIND)
            reader = load_columns(solution + (at * G + head) * K, G * K, count, lane, K, SIZE)
            if MIXES:
                share = load_per_token(mix + at * G + head, count, G, SIZE)[None, :]
                query = load_columns(q + at * q_token, q_token, count, lane, K, SIZE).to(tl.float32)
                reader = (query + share * (reader.to(tl.float32) - query)).to(KIND)
            state = product(reader, right, PRECISION, state)
        store_block(to_cross_prior + (sequence * G + head) * K * V, lane, column, state, K, V)


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
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    if count <= 0:
        return
    slot, row = index.to(tl.int64) * G + head, token * G + head
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
        decay += tl.sum(tl.where(t[None, :] >= t[:, None], by_entry[None, :], (weight * by_exit)[None, :]), 1)
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
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    if count <= 0:
        return
    slot, row = index.to(tl.int64) * G + head, token * G + head
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
        grown = tl.sum(later * (spread * fade)[None, :], 1)
        pairs = product((later * spread[None, :]).to(KIND), tl.trans(later.to(KIND)), PRECISION)
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
        found = tl.sum(tl.where(t[None, :] >= t[:, None], after[None, :], 0.0), 1)
        found += (
            tl.sum(weight * leaving, 0) + tl.load(across + slot) * far + load_per_token(to_decay + row, count, G, SIZE)
        )
        tl.store(to_decay + row + t * G, found, mask=t < count)


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


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    solution: Tensor,
    norms: Tensor,
    grams: Tensor,
    crosses: Tensor,
    segments: Tensor | None,
    to_mean: Tensor,
    to_read: Tensor | None,
    to_cross: Tensor,
    to_gram: Tensor,
    adaptive: bool,
    level: float,
    conjugate: bool,
    iterations: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, gain, mix (of size 0 where there is none) and the prior U and H."""
    (batch, length, shared, width), heads = k.shape, v.shape[2]
    s = shape_of(k, v, segments, size)
    q, k, v, to_mean, to_gram = rows(q), rows(k), rows(v), rows(to_mean), (to_gram + to_gram.mT) / 2
    like, single = {"dtype": k.dtype, "device": k.device}, {"dtype": torch.float32, "device": k.device}
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    share, clock = k if mix is None else mix.contiguous(), paced(s, log_decay, gain, k)
    decays, numbers = {"DECAYS": log_decay is not None}, (batch, length, heads)
    kinds = {"GAINS": gain is not None, "MIXES": mix is not None, "ADAPTIVE": adaptive, **decays}
    carried = torch.empty(s.cut.count, heads, **single)
    adjoint = tokens(*numbers, width, **like)
    summed = k.dtype if heads == shared else torch.float32  # over the value heads that share a key
    to_q, to_k = (tokens(*numbers, width, dtype=summed, device=k.device) for _ in range(2))
    to_v, (spreads, reads, owns, written) = (
        tokens(v.shape, **like),
        torch.empty(4, s.cut.count, heads, size, **single),
    )
    to_mix, to_gain, to_decay = (
        tokens(numbers, **single) if x is not None else q.new_empty(0) for x in (mix, gain, log_decay)
    )
    resolve[s.grid](
        q, k, v, *clock[:3], clock.weights, share, grams, crosses, norms, solution, to_mean,
        k if to_read is None else to_read.contiguous(), adjoint, to_q, to_mix, spreads, reads, owns, written, carried,
        *s.tiles, iterations, level, *strides(q, k, v, to_mean), heads, s.share,
        BLOCK=block_of(s), READS=to_read is not None, CONJUGATE=conjugate, NOTHING=NOTHING, **kinds, **s.compiled,
        **s.solved,
    )  # fmt: skip
    gram_adjoints, cross_adjoints = torch.empty_like(grams), torch.empty_like(crosses)
    to_gram_prior, to_cross_prior = (torch.empty(x.shape, **single) for x in (to_gram, to_cross))
    retreat[s.cut.sequences, heads, s.strips[1]](
        q, k, share, grams, solution, adjoint, to_mean, clock.entering, clock.across, written, carried, gram_adjoints,
        cross_adjoints, to_gram, to_cross, to_gram_prior, to_cross_prior, s.cut.runs, length, s.cut.tiles,
        *strides(q, k, to_mean), *to_gram.stride(), *to_cross.stride(), heads, s.share,
        MIXES=mix is not None, ADAPTIVE=adaptive, **decays, **s.carried, **s.compiled,
    )  # fmt: skip
    gains, mixes, pulled = *({name: kinds[name]} for name in ("GAINS", "MIXES")), s.solved | {"num_warps": 4}
    pull_values[s.grid](
        q, k, v, *clock[:2], clock.across, clock.weights, share, crosses, solution, to_mean, reads,
        cross_adjoints, to_k, to_v, to_gain, to_decay, *s.tiles, *strides(q, k, v, to_mean), heads, s.share, BLOCK=64,
        **decays, **gains, **mixes, **s.compiled, **pulled,
    )  # fmt: skip
    pull_keys[s.grid](
        k, *clock[:3], clock.across, clock.weights, grams, norms, solution, adjoint, spreads, owns,
        gram_adjoints, to_k, to_gain, to_decay, *s.tiles, *strides(k), heads, s.share, BLOCK=64, ADAPTIVE=adaptive,
        **decays, **gains, **s.compiled, **pulled,
    )  # fmt: skip
    if heads != shared:
        to_q, to_k = (x.unflatten(2, (shared, -1)).sum(3).to(k.dtype) for x in (to_q, to_k))
    found = zip((to_decay, to_gain, to_mix), (log_decay, gain, mix), strict=True)
    to_decay, to_gain, to_mix = (x if like is None else x.to(like.dtype) for x, like in found)
    return to_q, to_k, to_v, to_decay, to_gain, to_mix, to_cross_prior, to_gram_prior
