"""`dense` in Triton, backward: the adjoint of the covariance and of every token's gain.

With Q the adjoint of the covariance after a token, c its gain, s its innovation variance and F = I - c k' (so that the
covariance after it is F Pb), the token's own gradients and the adjoint before it are

    w = F' dc / s,   e = Q c,   m = c'Q c,   du = w - 2 e + m k,   ds = m - dc'c / s
    dk = ds s c + Pb du,   d obs_noise = ds,   dPb = F'Q F + sym(w k') = Q + sym(du k'),   d process_noise = tr dPb

and dP = A dPb A. Over a block this is linear in Q: with W the block's own gains at its exit (what each value adds to
the mean there), E = W Q and Z = E A - E W' K~ / 2 - Y,

    dP = A Q A - K~' Z - Z' K~

where Y holds what the tokens of the block add. Only that is sequential. So there are four launches:

1. `_gather`: W and Y of every block, at once;
2. `_retreat`: the adjoint from block to block, last to first, noting E;
3. `_pull_back`: du of every token, and what follows without the covariance, at once;
4. `_finish`: P du, the covariance stepping through a window from where the forward pass kept it, all windows at once.

A decay's gradient needs no product of Q and P: rescaling a row of the state, its key and its gain changes nothing.
So with h = diag(Q P) after a token, diag(dPb Pb) = h + (dc c + dk k + dq q) / 2, and the gradient of its log-decay is
twice what is left of this when the process noise's share is gone. `_retreat` notes h at the entry of every window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.dense.triton_parts import (
    COUNTS,
    Launch,
    as_inputs,
    block_of,
    chain_warps,
    decay_kind,
    decay_of,
    faded,
    launch,
    narrow_product,
    product,
    splits,
    token_warps,
)
from kalmix.kernels.dense.triton_wide_backward import backward_wide
from kalmix.kernels.dense.windows import BLOCK, NARROW, WINDOW, padded
from kalmix.kernels.primitives.triton_tiles import cut_tokens, rows, run_of, tile_of
from kalmix.segments import Segments


@triton.jit(do_not_specialize=COUNTS)
def _gather(
    q, k, log_decay, gain, scale, grad_gain, keys, writes, local, asked, coefficients, edges, table, length, tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1)
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
        given = tl.load(grad_gain + at * K + lane, mask=lane < K, other=0.0)
        own = (given - tl.sum(given * this, 0) * key) / tl.load(scale + at)
        decay = decay_of(log_decay, at, lane, K, P, DECAY)
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
def _retreat(
    keys, writes, local, asked, grad_read, edges, kept, grad_last, exits, spreads, balance, grad_prior, runs,
    length, tiles, G,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile, token, count = run_of(runs, sequence, length, tiles, PACKED)
    PIECES: tl.constexpr = WINDOW // BLOCK
    i, j, row = tl.arange(0, P), tl.arange(0, P), tl.arange(0, BLOCK)
    inside = (i < K)[:, None] & (j < K)[None, :]
    whole = (sequence * G + head) * (K * K) + i[:, None] * K + j[None, :]
    adjoint = tl.load(grad_last + whole, mask=inside, other=0.0)
    spread = tl.sum(tl.where(i[:, None] == j[None, :], adjoint, 0.0), 1)  # the diagonal
    flat, turn = row[:, None] * P + j[None, :], row[None, :] * P + i[:, None]
    windows = tl.cdiv(count, WINDOW)
    for away in range(windows):
        window = windows - 1 - away
        start, end = window * PIECES, tl.minimum((window + 1) * PIECES, tl.cdiv(count, BLOCK))
        for back in range(end - start):
            block = end - 1 - back
            slot = (tile * PIECES + block) * G + head
            base = slot * (BLOCK * P)
            write, written = tl.load(writes + base + flat), tl.load(writes + base + turn)
            key, turned = tl.load(keys + base + flat), tl.load(keys + base + turn)
            added = tl.load(local + base + turn)
            reach = tl.load(edges + slot * P + i)
            tl.store(spreads + slot * P + i, spread)
            leaving = product(adjoint, written, SPLIT)
            tl.store(exits + base + turn, leaving)
            twice = narrow_product(write, leaving, SPLIT, BLOCK, P)
            change = added - leaving * reach[:, None] + product(turned, 0.5 * twice, SPLIT)
            spread = spread * reach * reach + 2.0 * tl.sum(turned * change, 1)
            adjoint = faded(adjoint, edges + slot * P, i, j, DECAY)
            adjoint += product(turned, tl.trans(change), SPLIT, product(change, key, SPLIT))
            if VARIANCE:
                t = block * BLOCK + row
                weight = tl.load(grad_read + (token + t) * G + head, mask=t < count, other=0.0).to(tl.float32)
                query = tl.load(asked + base + turn)
                spread += tl.sum(query * query * weight[None, :], 1)
                adjoint += product(query * weight[None, :], tl.load(asked + base + flat), SPLIT)
        if DECAY:
            here = (tile + window) * G + head
            state = tl.load(kept + here * (P * P) + i[:, None] * P + j[None, :])
            tl.store(balance + here * P + i, tl.sum(adjoint * state, 1))
    tl.store(grad_prior + whole, adjoint, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _pull_back(
    q, k, process_noise, log_decay, gain, scale, grad_gain, grad_read, coefficients, exits, spreads,
    dk, dq, grad_obs, grad_process, changes, queries, noises, gathered, flows, table, length, tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1)
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
        given = tl.load(grad_gain + at * K + lane, mask=lane < K, other=0.0)
        by_key = tl.load(coefficients + t * BLOCK)
        by_own = tl.load(coefficients + (BLOCK + t) * BLOCK)
        total = tl.load(scale + at)
        along = tl.sum(given * this, 0)
        own = (given - along * key) / total
        decay = decay_of(log_decay, at, lane, K, P, DECAY)
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
        if DECAY:
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
        decay = decay_of(log_decay, at, lane, K, P, DECAY)
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
def _finish(
    q, k, log_decay, kept, changes, queries, noises, gathered, edges, flows, balance, dk, dq, grad_decay, table,
    length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    window, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, count = tile_of(table, window, length, tiles, WINDOW, PACKED)
    PIECES: tl.constexpr = WINDOW // BLOCK
    i, j, row = tl.arange(0, P), tl.arange(0, P), tl.arange(0, BLOCK)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    turn, whole = row[None, :] * P + i[:, None], row[None, :] * P + j[:, None]
    state = tl.load(kept + (window * G + head) * (P * P) + i[:, None] * P + j[None, :])
    spare = tl.zeros([P], tl.float32)  # process noise that is not on its diagonal
    if DECAY:
        flow = tl.load(balance + (window * G + head) * P + i)
    blocks = tl.cdiv(count, BLOCK).to(tl.int32)
    for block in range(blocks):
        slot = (window * PIECES + block) * G + head
        base = slot * (BLOCK * P)
        t = block * BLOCK + row
        live = (t < count)[None, :] & (i < K)[:, None]
        first = (token + block * BLOCK) * G + head
        at, to = row * G, row[None, :] * (G * K) + i[:, None]
        if DECAY == 2:
            logs = tl.load(log_decay + first * K + to, mask=live, other=0.0).to(tl.float32)
            reach = tl.exp(tl.cumsum(logs, 1))
        elif DECAY == 1:
            logs = tl.load(log_decay + first + at, mask=t < count, other=0.0).to(tl.float32)
            reach = tl.exp(tl.cumsum(logs, 0))[None, :] + tl.zeros([P, BLOCK], tl.float32)
        else:
            reach = tl.full([P, BLOCK], 1.0, tl.float32)
        change, of_band = tl.load(changes + base + whole), tl.load(changes + base + turn)
        by_key = tl.load(dk + first * K + to, mask=live, other=0.0)
        by_key += reach * (product(state, change, SPLIT) + spare[:, None] * of_band)
        tl.store(dk + first * K + to, by_key, mask=live)
        if VARIANCE:
            query, of_band = tl.load(queries + base + whole), tl.load(queries + base + turn)
            by_query = tl.load(dq + first * K + to, mask=live, other=0.0)
            by_query += reach * (product(state, query, SPLIT) + spare[:, None] * of_band)
            tl.store(dq + first * K + to, by_query, mask=live)
        if DECAY:
            key = tl.load(k + block * (BLOCK * k_token) + row[None, :] * k_token + i[:, None], mask=live, other=0.0)
            change = tl.load(flows + base + turn, mask=live, other=0.0) - 0.5 * by_key * key.to(tl.float32)
            if VARIANCE:
                query = tl.load(
                    q + block * (BLOCK * q_token) + row[None, :] * q_token + i[:, None], mask=live, other=0.0
                )
                change -= 0.5 * by_query * query.to(tl.float32)
            before = 2.0 * (flow[:, None] + tl.cumsum(change, 1) - change)
            flow += tl.sum(change, 1)
            if DECAY == 2:
                tl.store(grad_decay + first * K + to, before, mask=live)
            else:
                tl.store(grad_decay + first + at, tl.sum(tl.where(live, before, 0.0), 0), mask=t < count)
        if block + 1 < blocks:
            write, turned = tl.load(noises + base + row[:, None] * P + j[None, :]), tl.load(noises + base + turn)
            state = faded(state, edges + slot * P, i, j, DECAY) - product(turned, write, SPLIT)
            fade = tl.load(edges + slot * P + i)
            spare = spare * fade * fade + tl.load(gathered + slot * P + i)


def backward(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    gain: Tensor,
    scale: Tensor,
    kept: Tensor,
    segments: Segments | None,
    grad_gain: Tensor,
    grad_read: Tensor | None,
    grad_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, obs_noise, process_noise, log_decay and the prior's covariance."""
    (batch, length, shared, width), heads = k.shape, obs_noise.shape[2]
    if width > NARROW:
        signals = (q, k, obs_noise, process_noise, log_decay)
        return backward_wide(*signals, gain, scale, kept, segments, grad_gain, grad_read, grad_last)
    like = {"dtype": torch.float32, "device": k.device}
    kinds = [x.dtype for x in (q, k, obs_noise, process_noise, k if log_decay is None else log_decay)]
    q, k, variance = rows(q), rows(k), grad_read is not None
    grad_gain, process_noise = grad_gain.contiguous(), process_noise.contiguous()
    grad_last = ((grad_last + grad_last.mT) / 2).contiguous()
    grad_read = grad_read.contiguous() if grad_read is not None else scale
    kind, logs = decay_kind(log_decay), k if log_decay is None else log_decay.contiguous()
    cut, lanes = cut_tokens(batch, length, WINDOW, segments, k), padded(width)
    blocks = cut.count * (WINDOW // BLOCK)
    shape = {"K": width, "P": lanes, "BLOCK": BLOCK, "WINDOW": WINDOW, "PACKED": segments is not None}
    shape |= {"VARIANCE": variance, "DECAY": kind}
    strides = (*q.stride()[1:3], *k.stride()[1:3])
    steps = []

    def scratch(*sizes: int) -> Tensor:
        return torch.empty(blocks, heads, *sizes, **like)

    keys, writes, local, exits = (scratch(BLOCK, lanes) for _ in range(4))
    asked = scratch(BLOCK, lanes) if variance else keys
    coefficients, edges, spreads = scratch(3, BLOCK, BLOCK), scratch(lanes), scratch(lanes)
    steps.append(Launch(_gather, (blocks, heads), (
        q, k, logs, gain, scale, grad_gain, keys, writes, local, asked, coefficients, edges, cut.table, length,
        cut.tiles, *strides, heads, heads // shared,
    ), dict(SPLIT=splits(), num_warps=token_warps(lanes), **shape)))  # fmt: skip
    balance = torch.empty(cut.count, heads, lanes, **like)
    options = {"SPLIT": splits(), "num_warps": chain_warps(lanes), "num_stages": 1, **shape}
    grad_prior = torch.empty(grad_last.shape, **like)
    steps.append(Launch(_retreat, (cut.sequences, heads), (
        keys, writes, local, asked, grad_read, edges, kept, grad_last, exits, spreads, balance, grad_prior,
        cut.runs, length, cut.tiles, heads,
    ), options))  # fmt: skip
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    dk = tokens(batch, length, heads, width, **like)
    dq = tokens(batch, length, heads, width, **like) if variance else dk
    grad_obs, grad_process = (tokens(batch, length, heads, **like) for _ in range(2))
    changes, noises, flows, queries = keys, writes, local, asked  # what they held is spent
    gathered = scratch(lanes)
    steps.append(Launch(_pull_back, (blocks, heads), (
        q, k, process_noise, logs, gain, scale, grad_gain, grad_read, coefficients, exits, spreads,
        dk, dq, grad_obs, grad_process, changes, queries, noises, gathered, flows, cut.table, length, cut.tiles,
        *strides, heads, heads // shared,
    ), dict(num_warps=token_warps(lanes), **shape)))  # fmt: skip
    grad_decay = torch.empty(0, **like) if log_decay is None else tokens(log_decay.shape, **like)
    steps.append(Launch(_finish, (cut.count, heads), (
        q, k, logs, kept, changes, queries, noises, gathered, edges, flows, balance, dk, dq, grad_decay, cut.table,
        length, cut.tiles, *strides, heads, heads // shared,
    ), options))  # fmt: skip
    launch(steps)

    grads = (dq if variance else None, dk, grad_obs, grad_process, grad_decay)
    return *as_inputs(grads, kinds, shared), grad_prior
