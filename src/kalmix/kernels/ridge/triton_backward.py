r"""`ridge` in Triton, backward: one more solve a token, and the adjoint of H from tile to tile.

With y = S^{-1} dx, Lemma 2 and equation 13 of Gated KalmaNet give what a token's solution says of its H,

    dH_t = -(y_t x_t' + x_t y_t') / 2 + w_t H_t,     w_t = -a x_t'y_t / ||H_t||_F, 0 for a fixed ridge

and the adjoint of H after a token is that of all later ones, decayed: Lambda_s = sum_{t >= s} A(t, s) dH_t. Then
dk_s = 2 g_s Lambda_s k_s, dg_s = k_s'Lambda_s k_s, and the log-decay's gradient is <Lambda_t, H_t> less what the token
wrote, gathered inside a tile from its end. There are five launches, all tiles at once but for `retreat`, the adjoint
from tile to tile: `aim` (dx), `solve`, `settle` (dq and w), `retreat`, `pull_back`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.primitives.triton_decays import between, between_transposed, elapsed
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
from kalmix.kernels.ridge.triton_solve import load_square, shape_of, solve_all, store_square
from kalmix.solvers import NOTHING


@triton.jit(do_not_specialize=LOOSE)
def aim(
    q, mix, to_mixed, to_read, to_x, table, length, tiles, q_token, q_head, m_token, m_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, MIXES: tl.constexpr,
    READS: tl.constexpr,
):  # fmt: skip
    """dx of a tile's tokens."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    row, column = token * G + head, tl.arange(0, P)
    given = load_rows(to_mixed + token * m_token + head * m_head, m_token, count, column, K, SIZE).to(tl.float32)
    if MIXES:
        given *= load_per_token(mix + row, count, G, SIZE)[:, None]
    if READS:
        query = load_rows(q + token * q_token + head // SHARE * q_head, q_token, count, column, K, SIZE)
        given += load_per_token(to_read + row, count, G, SIZE)[:, None] * query.to(tl.float32)
    store_rows(to_x + row * K, G * K, count, column, given, K, SIZE)


@triton.jit(do_not_specialize=LOOSE)
def settle(
    q, log_decay, gain, mix, solution, adjoint, norms, to_mixed, to_read, to_q, to_mix, spreads, entering, written,
    carried, across, table, length, tiles, level, q_token, q_head, m_token, m_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, DECAYS: tl.constexpr,
    GAINS: tl.constexpr, MIXES: tl.constexpr, READS: tl.constexpr, ADAPTIVE: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """dq, dmix and w of a tile's tokens; and how w H adds up: at the entry, and on each token written."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    row, slot = token * G + head, index.to(tl.int64) * G + head
    t, column = tl.arange(0, SIZE), tl.arange(0, P)
    y = load_rows(adjoint + row * K, G * K, count, column, K, SIZE).to(tl.float32)
    x = load_rows(solution + row * K, G * K, count, column, K, SIZE).to(tl.float32)
    decays, fade = tl.where(t[:, None] >= t[None, :], 1.0, 0.0), tl.full([SIZE], 1.0, tl.float32)
    if DECAYS:
        since, total = elapsed(log_decay, token, count, head, G, SIZE)
        decays, fade = between(since, SIZE), tl.exp(since.to(tl.float32))
        tl.store(across + slot, tl.exp(total.to(tl.float32)))
    tl.store(entering + row + t * G, fade, mask=t < count)
    if ADAPTIVE:
        norm = load_per_token(norms + row, count, G, SIZE)
        spread = -level * tl.sum(x * y, 1) / tl.where(norm > NOTHING, norm, 1.0)
        tl.store(spreads + row + t * G, spread, mask=t < count)
        again = tl.sum(decays * (fade * spread)[:, None], 0)
        if GAINS:
            again *= load_per_token(gain + row, count, G, SIZE)
        tl.store(written + row + t * G, again, mask=t < count)
        tl.store(carried + slot, tl.sum(fade * fade * spread, 0))
    if READS:
        y += load_per_token(to_read + row, count, G, SIZE)[:, None] * x
    if MIXES:
        given = load_rows(to_mixed + token * m_token + head * m_head, m_token, count, column, K, SIZE).to(tl.float32)
        query = load_rows(q + token * q_token + head // SHARE * q_head, q_token, count, column, K, SIZE).to(tl.float32)
        y += (1.0 - load_per_token(mix + row, count, G, SIZE))[:, None] * given
        tl.store(to_mix + row + t * G, tl.sum(given * (x - query), 1), mask=t < count)
    store_rows(to_q + row * K, G * K, count, column, y, K, SIZE)


@triton.jit(do_not_specialize=LOOSE)
def retreat(
    k, solution, adjoint, states, entering, written, carried, adjoints, to_last, to_prior, across, runs, length, tiles,
    k_token, k_head, last_n, last_g, last_i, last_j, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, ADAPTIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of Lambda of one sequence and head, from its end, noted as it is after every tile."""
    KIND: tl.constexpr = adjoint.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, P), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    tile, token, tokens = run_of(runs, sequence, length, tiles, PACKED)
    inside = (row < K)[:, None] & (column < K)[None, :]
    to_last += sequence * last_n + head * last_g
    state = tl.load(to_last + row[:, None] * last_i + column[None, :] * last_j, mask=inside, other=0.0)
    k += head // SHARE * k_head
    count_of = tl.cdiv(tokens, SIZE)
    for step in range(count_of):
        i = count_of - 1 - step
        count = tl.minimum(tokens - i * SIZE, SIZE)
        at, slot = token + i * SIZE, (tile + i) * G + head
        base = (at * G + head) * K
        store_square(adjoints + slot * K * K, row, column, state, K, P)
        if DECAYS:
            state *= tl.load(across + slot)
        half = -0.5 * load_per_token(entering + at * G + head, count, G, SIZE)[:, None]
        y, x = adjoint + base, solution + base
        right = (load_rows(x, G * K, count, column, K, SIZE).to(tl.float32) * half).to(KIND)
        state = product(load_columns(y, G * K, count, row, K, SIZE), right, PRECISION, state)
        right = (load_rows(y, G * K, count, column, K, SIZE).to(tl.float32) * half).to(KIND)
        state = product(load_columns(x, G * K, count, row, K, SIZE), right, PRECISION, state)
        if ADAPTIVE:
            weight = load_per_token(written + at * G + head, count, G, SIZE)[:, None]
            right = (load_rows(k + at * k_token, k_token, count, column, K, SIZE).to(tl.float32) * weight).to(KIND)
            left = load_columns(k + at * k_token, k_token, count, row, K, SIZE).to(KIND)
            state = product(left, right, PRECISION, state)
            state += tl.load(carried + slot) * load_square(states + slot * K * K, row, column, K, P).to(tl.float32)
    store_square(to_prior + (sequence * G + head) * K * K, row, column, state, K, P)


@triton.jit(do_not_specialize=LOOSE)
def pull_back(
    k, log_decay, gain, states, solution, adjoint, norms, spreads, adjoints, to_k, to_gain, to_decay, table, length,
    tiles, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, DECAYS: tl.constexpr,
    GAINS: tl.constexpr, ADAPTIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dgain and the log-decay's gradient of a tile's tokens."""
    KIND: tl.constexpr = adjoint.dtype.element_ty
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    if count <= 0:
        return
    slot, row = index.to(tl.int64) * G + head, token * G + head
    t, column = tl.arange(0, SIZE), tl.arange(0, P)
    k += token * k_token + head // SHARE * k_head
    solution += row * K
    adjoint += row * K
    states += slot * K * K
    adjoints += slot * K * K
    later = tl.where(t[:, None] <= t[None, :], 1.0, 0.0)  # [s, t]
    fade, left = tl.full([SIZE], 1.0, tl.float32), tl.full([SIZE], 1.0, tl.float32)
    across = 1.0
    if DECAYS:
        since, total = elapsed(log_decay, token, count, head, G, SIZE)
        later, fade = between_transposed(since, SIZE), tl.exp(since.to(tl.float32))
        left, across = tl.exp((total - since).to(tl.float32)), tl.exp(total.to(tl.float32))
    weight = tl.full([SIZE], 1.0, tl.float32)
    if GAINS:
        weight = load_per_token(gain + row, count, G, SIZE)
    key = load_rows(k, k_token, count, column, K, SIZE).to(KIND)
    turned = product(key, load_square(adjoints, column, column, K, P), PRECISION) * left[:, None]
    ahead = tl.sum(weight * tl.sum(turned * load_rows(k, k_token, count, column, K, SIZE).to(tl.float32), 1), 0)
    x = load_rows(solution, G * K, count, column, K, SIZE)
    y = load_rows(adjoint, G * K, count, column, K, SIZE)
    by_x = product(key, load_columns(solution, G * K, count, column, K, SIZE), PRECISION)
    by_y = product(key, load_columns(adjoint, G * K, count, column, K, SIZE), PRECISION)
    turned = product((-0.5 * later * by_y).to(KIND), x, PRECISION, turned)
    turned = product((-0.5 * later * by_x).to(KIND), y, PRECISION, turned)
    if ADAPTIVE:
        spread = load_per_token(spreads + row, count, G, SIZE)
        entry = load_square(states, column, column, K, P)
        turned += tl.sum(later * (spread * fade)[None, :], 1)[:, None] * product(key, entry, PRECISION)
        both = product((later * spread[None, :]).to(KIND), tl.trans(later.to(KIND)), PRECISION)
        again = load_columns(k, k_token, count, column, K, SIZE).to(KIND)
        both *= product(key, again, PRECISION) * weight[None, :]
        turned = product(both.to(KIND), load_rows(k, k_token, count, column, K, SIZE).to(KIND), PRECISION, turned)
    said = tl.sum(turned * load_rows(k, k_token, count, column, K, SIZE).to(tl.float32), 1)
    store_rows(to_k + row * K, G * K, count, column, 2.0 * weight[:, None] * turned, K, SIZE)
    if GAINS:
        tl.store(to_gain + row + t * G, said, mask=t < count)
    if DECAYS:
        entry = load_square(states, column, column, K, P)
        image = product(load_rows(solution, G * K, count, column, K, SIZE), entry, PRECISION)
        own = tl.sum(image * load_rows(adjoint, G * K, count, column, K, SIZE).to(tl.float32), 1) * fade
        own += tl.sum(later * by_x * by_y * weight[:, None], 0)
        held = 0.0 - own - weight * said
        if ADAPTIVE:
            norm = load_per_token(norms + row, count, G, SIZE)
            held += load_per_token(spreads + row, count, G, SIZE) * norm * norm
        far = load_square(adjoints, column, column, K, P).to(tl.float32) * load_square(states, column, column, K, P).to(
            tl.float32
        )
        ahead += across * tl.sum(tl.sum(far, 1), 0)
        found = tl.sum(tl.where(t[None, :] >= t[:, None], held[None, :], 0.0), 1) + ahead
        tl.store(to_decay + row + t * G, found, mask=t < count)


def backward(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    solution: Tensor,
    norms: Tensor,
    high: Tensor,
    low: Tensor,
    segments: Tensor | None,
    to_mixed: Tensor,
    to_read: Tensor | None,
    to_last: Tensor,
    adaptive: bool,
    level: float,
    conjugate: bool,
    iterations: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, log_decay, gain, mix (of size 0 where there is none) and the prior."""
    (batch, length, shared, width), heads = k.shape, solution.shape[2]
    s = shape_of(k, heads, segments, size)
    q, k, to_mixed, to_last = rows(q), rows(k), rows(to_mixed), (to_last + to_last.mT) / 2
    like, single = {"dtype": k.dtype, "device": k.device}, {"dtype": torch.float32, "device": k.device}
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    log_decay, gain, mix = (None if x is None else x.contiguous() for x in (log_decay, gain, mix))
    log, weight, share = (k if x is None else x for x in (log_decay, gain, mix))
    decays = {"DECAYS": log_decay is not None}
    kinds, uses = {"GAINS": gain is not None, "ADAPTIVE": adaptive, **decays}, {"READS": to_read is not None}
    uses["MIXES"] = mix is not None
    compiled = {name: x for name, x in s.compiled.items() if name != "PRECISION"}
    numbers = (batch, length, heads)
    to_read = k if to_read is None else to_read.contiguous()
    to_x = to_mixed
    if any(uses.values()):
        to_x = torch.empty(solution.shape, **like)
        aim[s.grid](
            q, share, to_mixed, to_read, to_x, *s.tiles, *strides(q, to_mixed), heads, s.share, **uses, **compiled
        )
    adjoint = tokens(*numbers, width, **like)
    solve_all(s, to_x, k, log_decay, gain, high, low, norms, adjoint, adaptive, level, conjugate, iterations)
    summed = k.dtype if heads == shared else torch.float32  # over the value heads that share a key
    to_q, to_k = (tokens(*numbers, width, dtype=summed, device=k.device) for _ in range(2))
    spreads, entering, written = torch.empty(3, *numbers, **single)
    to_mix, to_gain, to_decay = (
        tokens(numbers, **single) if x is not None else q.new_empty(0) for x in (mix, gain, log_decay)
    )
    carried, across = torch.empty(2, s.cut.count, heads, **single)
    settle[s.grid](
        q, log, weight, share, solution, adjoint, norms, to_mixed, to_read, to_q, to_mix, spreads, entering, written,
        carried, across, *s.tiles, level, *strides(q, to_mixed), heads, s.share,
        NOTHING=NOTHING, **uses, **kinds, **compiled,
    )  # fmt: skip
    adjoints = torch.empty(s.cut.count, heads, width, width, **like)
    to_prior = torch.empty(to_last.shape, **single)
    retreat[s.cut.sequences, heads, triton.cdiv(s.lanes, s.strip)](
        k, solution, adjoint, high, entering, written, carried, adjoints, to_last, to_prior, across, s.cut.runs,
        length, s.cut.tiles, *strides(k), *to_last.stride(), heads, s.share,
        VALUES=s.strip, ADAPTIVE=adaptive, **decays, **s.compiled | {"num_warps": 4},
    )  # fmt: skip
    pull_back[s.grid](
        k, log, weight, high, solution, adjoint, norms, spreads, adjoints, to_k, to_gain, to_decay, *s.tiles,
        *strides(k), heads, s.share, **kinds, **s.compiled | {"num_warps": 8},
    )  # fmt: skip
    if heads != shared:
        to_q, to_k = (x.unflatten(2, (shared, -1)).sum(3).to(k.dtype) for x in (to_q, to_k))
    found = zip((to_decay, to_gain, to_mix), (log_decay, gain, mix), strict=True)
    to_decay, to_gain, to_mix = (x if like is None else x.to(like.dtype) for x, like in found)
    return to_q, to_k, to_decay, to_gain, to_mix, to_prior
