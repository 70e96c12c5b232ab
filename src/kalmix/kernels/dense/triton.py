"""`dense` in Triton, forward: gains, read-out variance and final covariance (its mean is the op `delta`).

The covariance does not see the values, and steps through time in blocks of 16 tokens. With P the covariance that
enters a block, A(t, s) the decay from token s to token t and N_t the process noise gathered since the entry,

    C[t, s] = k~_t' P k~_s + k_t' A(t, s) N_s k_s + [t = s] r_t^2      innovation covariance, k~_t = A(t, entry) k_t
    G[s]    = A(exit, entry) P k~_s + A(exit, s) N_s k_s
    P'      = A P A + N - X' X,    X = L^-1 G,    C = L L'

and only P K~' and what follows from it is sequential. So there are three launches:

1. `_prepare`: what the noises and decays of every block come to, at once;
2. `_advance`: the covariance from block to block, noting P k~ of every token;
3. `_gains`: the gain and the variance of every token from these, by the recursion inside its block, at once.

Decays are multiplied up token by token or run from the entry on: never the exponential of a positive number. Blocks
lie in windows of 64 tokens; the backward pass starts from a covariance at the entry of each. Covariances too wide for
a program's registers are for `triton_wide`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.dense.triton_parts import (
    COUNTS,
    Launch,
    block_of,
    chain_warps,
    decay_kind,
    decay_of,
    faded,
    inverse_cholesky,
    launch,
    narrow_product,
    product,
    splits,
    token_warps,
)
from kalmix.kernels.dense.triton_wide import forward_wide
from kalmix.kernels.dense.windows import BLOCK, NARROW, WINDOW, padded
from kalmix.kernels.primitives.triton_tiles import cut_tokens, rows, run_of
from kalmix.segments import Segments


@triton.jit(do_not_specialize=COUNTS)
def _prepare(
    q, k, obs_noise, process_noise, log_decay, keys, queries, noises, innovations, edges, table, length, tiles,
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
        decay = decay_of(log_decay, at, lane, K, P, DECAY)
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


@triton.jit(do_not_specialize=[*COUNTS, "n_stride", "g_stride", "i_stride", "j_stride"])
def _advance(
    obs_noise, keys, queries, noises, innovations, edges, covariance, projected, asked, kept, last, runs, length, tiles,
    n_stride, g_stride, i_stride, j_stride, G,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    KEEP: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile, token, count = run_of(runs, sequence, length, tiles, PACKED)
    PIECES: tl.constexpr = WINDOW // BLOCK
    i, j, row = tl.arange(0, P), tl.arange(0, P), tl.arange(0, BLOCK)
    inside = (i < K)[:, None] & (j < K)[None, :]
    at = sequence * n_stride + head * g_stride + i[:, None] * i_stride + j[None, :] * j_stride
    state = tl.load(covariance + at, mask=inside, other=0.0)
    square, flat = i[:, None] * P + j[None, :], row[:, None] * P + j[None, :]
    turn = row[None, :] * P + i[:, None]  # products have the covariance first, which then stays in registers
    spare = tl.zeros([P], tl.float32)  # process noise that is still to be added to the diagonal
    for window in range(tl.cdiv(count, WINDOW)):
        state += tl.where(i[:, None] == j[None, :], spare[:, None], 0.0)
        spare = tl.zeros([P], tl.float32)
        if KEEP:
            tl.store(kept + ((tile + window) * G + head) * (P * P) + square, state)
        for block in range(window * PIECES, tl.minimum((window + 1) * PIECES, tl.cdiv(count, BLOCK))):
            slot = (tile * PIECES + block) * G + head
            base = slot * (BLOCK * P)
            key, turned = tl.load(keys + base + flat), tl.load(keys + base + turn)
            noise = tl.load(noises + base + turn)
            edge = edges + slot * 2 * P
            reach = tl.load(edge + i)
            C = tl.load(innovations + slot * (BLOCK * BLOCK) + row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
            t = block * BLOCK + row
            observed = tl.load(obs_noise + (token + t) * G + head, mask=t < count, other=float("inf")).to(tl.float32)

            seen = product(state, turned, SPLIT) + spare[:, None] * turned
            tl.store(projected + base + turn, seen)
            if VARIANCE:
                query = tl.load(queries + base + turn)
                tl.store(asked + base + turn, product(state, query, SPLIT) + spare[:, None] * query)
            C += narrow_product(key, seen, SPLIT, BLOCK, P)
            root = inverse_cholesky(C, tl.min(observed, 0), BLOCK)
            write = product(seen * reach[:, None] + noise, tl.trans(root), SPLIT)
            state = faded(state, edge, i, j, DECAY)
            spare = spare * reach * reach + tl.load(edge + P + i)
            state -= product(write, tl.trans(write), SPLIT)
    state += tl.where(i[:, None] == j[None, :], spare[:, None], 0.0)
    tl.store(last + (sequence * G + head) * (K * K) + i[:, None] * K + j[None, :], state, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _gains(
    q, k, obs_noise, process_noise, log_decay, projected, asked, gain, scale, read, table, length, tiles,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1)
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
        decay = decay_of(log_decay, at, lane, K, P, DECAY)
        reach *= decay
        noise = decay * decay * noise + tl.load(process_noise + at).to(tl.float32)
        written *= decay[None, :]
        known = scales * tl.sum(written * key[None, :], 1)
        warped = reach * tl.load(projected + t * P) + noise * key - tl.sum(written * known[:, None], 0)
        total = tl.load(obs_noise + at).to(tl.float32) + tl.maximum(tl.sum(key * warped, 0), 0.0)
        this = warped / total
        tl.store(gain + at * K + lane, this, mask=lane < K)
        tl.store(scale + at, total)
        written = tl.where((row == t)[:, None], this[None, :], written)
        scales = tl.where(row == t, total, scales)
        if VARIANCE:
            query = tl.load(q + t * q_token + lane, mask=lane < K, other=0.0).to(tl.float32)
            known = scales * tl.sum(written * query[None, :], 1)
            spread = reach * tl.load(asked + t * P) + noise * query - tl.sum(written * known[:, None], 0)
            tl.store(read + at, tl.maximum(tl.sum(query * spread, 0), 0.0))


def forward(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    covariance: Tensor,
    segments: Segments | None,
    variance: bool,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gains `[B, T, G, K]`, read-out variances `[B, T, G, 1]`, final covariance, innovation variances `[B, T, G]`."""
    (batch, length, shared, width), heads = k.shape, obs_noise.shape[2]
    if width > NARROW:
        return forward_wide(q, k, obs_noise, process_noise, log_decay, covariance, segments, variance, kept)
    like = {"dtype": torch.float32, "device": k.device}
    q, k = rows(q), rows(k)
    obs_noise, process_noise = obs_noise.contiguous(), process_noise.contiguous()
    kind, logs = decay_kind(log_decay), k if log_decay is None else log_decay.contiguous()
    cut, lanes = cut_tokens(batch, length, WINDOW, segments, k), padded(width)
    blocks = cut.count * (WINDOW // BLOCK)
    shape = {"K": width, "P": lanes, "BLOCK": BLOCK, "WINDOW": WINDOW, "PACKED": segments is not None}
    shape |= {"VARIANCE": variance, "DECAY": kind}

    def scratch(*sizes: int) -> Tensor:
        return torch.empty(blocks, heads, *sizes, **like)

    keys, noises, projected = (scratch(BLOCK, lanes) for _ in range(3))
    queries, asked = (scratch(BLOCK, lanes) if variance else keys for _ in range(2))
    innovations, edges = scratch(BLOCK, BLOCK), scratch(2, lanes)
    strides = (*q.stride()[1:3], *k.stride()[1:3])
    steps = []
    steps.append(Launch(_prepare, (blocks, heads), (
        q, k, obs_noise, process_noise, logs, keys, queries, noises, innovations, edges, cut.table, length, cut.tiles,
        *strides, heads, heads // shared,
    ), dict(num_warps=token_warps(lanes), **shape)))  # fmt: skip
    last = torch.empty(covariance.shape, **like)
    options = {"KEEP": kept.numel() > 0, "SPLIT": splits(), "num_warps": chain_warps(lanes), "num_stages": 1, **shape}
    steps.append(Launch(_advance, (cut.sequences, heads), (
        obs_noise, keys, queries, noises, innovations, edges, covariance, projected, asked, kept, last, cut.runs,
        length, cut.tiles, *covariance.stride(), heads,
    ), options))  # fmt: skip
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment write nothing
    gain = tokens(batch, length, heads, width, **like)
    scale = torch.empty(batch, length, heads, **like)
    read = tokens(batch, length, heads, 1, **like) if variance else torch.empty(0, **like)
    steps.append(Launch(_gains, (blocks, heads), (
        q, k, obs_noise, process_noise, logs, projected, asked, gain, scale, read, cut.table, length, cut.tiles,
        *strides, heads, heads // shared,
    ), dict(num_warps=token_warps(lanes), **shape)))  # fmt: skip
    launch(steps)
    return gain, read, last, scale
