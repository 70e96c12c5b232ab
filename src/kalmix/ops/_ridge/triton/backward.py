r"""`ridge` in Triton, backward: one more solve a token, and the adjoints of H and U from tile to tile.

With dx~ the gradient of what U is read with, U_t d(mean)_t, and y = S^{-1} dx, Lemma 2 and equation 13 of Gated
KalmaNet give what a token's solution says of its H,

    dH_t = -(y_t x_t' + x_t y_t') / 2 + w_t H_t,     w_t = -a x_t'y_t / ||H_t||_F, 0 for a fixed ridge

and the adjoint of H after a token is that of all later ones, decayed: Lambda_s = sum_{t >= s} A(t, s) dH_t; so is that
of U, Mu_s, with dU_t = x~_t d(mean)_t'. Then

    dk_s = g_s (2 Lambda_s k_s + Mu_s v_s),   dv_s = g_s Mu_s'k_s,   dg_s = k_s'(Lambda_s k_s + Mu_s v_s)

and the log-decay's gradient is <Lambda_t, H_t> less what the token wrote, gathered inside a tile from its end; U's
share is a sum over the pairs of tokens that a decay lies between. Mu is found from tile to tile (`retrace`) beside all
solutions (`resolve`: dq, y and w), then Lambda (`retreat`) beside what Mu gives (`pull_values`); `pull_keys` is last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._linear_memory.triton.forward import strides
from kalmix.ops._ridge.solvers import MIN_NORM
from kalmix.ops._ridge.triton.input_grads import pull_keys, pull_values
from kalmix.ops._ridge.triton.solve import (
    along,
    block_of,
    load_block,
    load_numbers,
    paced,
    paths,
    resolved,
    shape_of,
    solve,
    store_numbers,
    tile_here,
)
from kalmix.ops._ridge.triton.state_backward import retrace, retreat
from kalmix.ops._shared.triton.compile_and_launch import Launch, launch_on_side_stream
from kalmix.ops._shared.triton.tiles import LOOSE, load_per_token, load_rows, product, rows, store_rows


@triton.jit(do_not_specialize=[*LOOSE, "iterations"])
def resolve(
    q, k, v, since, beyond, entering, gains, mix, grams, crosses, norms, solution, to_mean, to_read, adjoint,
    to_q, to_mix, spreads, reads, owns, written, carried, table, length, tiles, iterations, level,
    q_token, q_head, k_token, k_head, v_token, v_head, m_token, m_head, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, GAINS: tl.constexpr, MIXES: tl.constexpr, READS: tl.constexpr, ADAPTIVE: tl.constexpr,
    CONJUGATE: tl.constexpr, MIN_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dmix, y and w of a tile's tokens; what H_0 and U_0 gave; how w H adds up, at the entry and on each token."""
    KIND: tl.constexpr = grams.dtype.element_ty
    head, token, count, row, slot = tile_here(table, length, tiles, G, SIZE, PACKED)
    if count <= 0:
        return
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
        given, gram, key, weights, fade, norm, level, iterations, ADAPTIVE, CONJUGATE, MIN_NORM, PRECISION
    )
    store_rows(adjoint + row * K, G * K, count, lane, y, K, SIZE)
    x = load_rows(solution, G * K, count, lane, K, SIZE)
    if DECAYS:
        own = along(product(y.to(KIND), gram, PRECISION), x, PRECISION)
        store_numbers(owns, slot, own * fade)
    if ADAPTIVE:
        spread = -tl.maximum(level, resolved(KIND)) * along(y, x, PRECISION) / tl.where(norm > MIN_NORM, norm, 1.0)
        store_numbers(spreads, slot, spread)
        store_numbers(written, slot, tl.sum(weights * (fade * spread)[:, None], 0))
        tl.store(carried + slot, tl.sum(fade * fade * spread, 0))
    if MIXES or READS:
        tl.debug_barrier()
        y += load_rows(to_q, G * K, count, lane, K, SIZE).to(tl.float32)
    store_rows(to_q, G * K, count, lane, y, K, SIZE)


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
    numbers, decays = (batch, length, heads), {"DECAYS": log_decay is not None}
    gains, mixes, ridges = {"GAINS": gain is not None}, {"MIXES": mix is not None}, {"ADAPTIVE": adaptive}
    adjoint, carried = tokens(*numbers, width, **like), torch.empty(s.cut.count, heads, **single)
    summed = k.dtype if heads == shared else torch.float32  # over the value heads that share a key
    to_q, to_k = (tokens(*numbers, width, dtype=summed, device=k.device) for _ in range(2))
    to_v, (spreads, reads, owns, written) = tokens(v.shape, **like), torch.empty(4, s.cut.count, heads, size, **single)
    to_mix, to_gain, to_decay = (
        tokens(numbers, **single) if x is not None else q.new_empty(0) for x in (mix, gain, log_decay)
    )
    gram_adjoints, cross_adjoints = torch.empty_like(grams), torch.empty_like(crosses)
    to_gram_prior, to_cross_prior = (torch.empty(x.shape, **single) for x in (to_gram, to_cross))

    arguments = (
        q, share, solution, to_mean, clock.entering, clock.across, cross_adjoints, to_cross, to_cross_prior,
        s.cut.runs, length, s.cut.tiles, *strides(q, to_mean), *to_cross.stride(), heads, s.share,
    )  # fmt: skip
    strips, options = s.strips[1] - s.strips[0], decays | mixes | s.carried | s.compiled
    wait = launch_on_side_stream(Launch(retrace, (s.cut.sequences, heads, strips), arguments, options))
    arguments = (
        q, k, v, *clock[:3], clock.weights, share, grams, crosses, norms, solution, to_mean,
        k if to_read is None else to_read.contiguous(), adjoint, to_q, to_mix, spreads, reads, owns, written, carried,
        *s.tiles, iterations, level, *strides(q, k, v, to_mean), heads, s.share,
    )  # fmt: skip
    options = decays | gains | mixes | ridges | s.compiled | s.solved
    options |= {"BLOCK": block_of(s), "READS": to_read is not None, "CONJUGATE": conjugate, "MIN_NORM": MIN_NORM}
    Launch(resolve, s.grid, arguments, options).run()
    wait()

    arguments = (
        k, grams, solution, adjoint, clock.entering, clock.across, written, carried, gram_adjoints, to_gram,
        to_gram_prior, s.cut.runs, length, s.cut.tiles, *strides(k), *to_gram.stride(), heads, s.share,
    )  # fmt: skip
    options = decays | ridges | s.carried | {"STAGES": 1} | s.compiled
    wait = launch_on_side_stream(Launch(retreat, (s.cut.sequences, heads, s.strips[0]), arguments, options))
    arguments = (
        q, k, v, *clock[:2], clock.across, clock.weights, share, crosses, solution, to_mean, reads,
        cross_adjoints, to_k, to_v, to_gain, to_decay, *s.tiles, *strides(q, k, v, to_mean), heads, s.share,
    )  # fmt: skip
    pulled = s.compiled | s.solved | {"num_warps": 4, "BLOCK": 64}
    Launch(pull_values, s.grid, arguments, decays | gains | mixes | pulled).run()
    wait()
    arguments = (
        k, *clock[:3], clock.across, clock.weights, grams, norms, solution, adjoint, spreads, owns,
        gram_adjoints, to_k, to_gain, to_decay, *s.tiles, *strides(k), heads, s.share,
    )  # fmt: skip
    Launch(pull_keys, s.grid, arguments, decays | gains | ridges | pulled).run()

    if heads != shared:
        to_q, to_k = (x.unflatten(2, (shared, -1)).sum(3).to(k.dtype) for x in (to_q, to_k))
    found = zip((to_decay, to_gain, to_mix), (log_decay, gain, mix), strict=True)
    to_decay, to_gain, to_mix = (x if like is None else x.to(like.dtype) for x, like in found)
    return to_q, to_k, to_v, to_decay, to_gain, to_mix, to_cross_prior, to_gram_prior
