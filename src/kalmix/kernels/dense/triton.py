"""`dense` in Triton, forward: gains, read-out variance and final covariance (its mean is the op `delta`).

The covariance does not see the values, and steps through time in blocks of 16 tokens. With P the covariance that
enters a block, A(t, s) the decay from token s to token t and N_t the process noise gathered since the entry,

    C[t, s] = k~_t' P k~_s + k_t' A(t, s) N_s k_s + [t = s] r_t^2      innovation covariance, k~_t = A(t, entry) k_t
    G[s]    = A(exit, entry) P k~_s + A(exit, s) N_s k_s
    P'      = A P A + N - X' X,    X = L^-1 G,    C = L L'

and only P K~' and what follows from it is sequential. So there are three launches:

1. `prepare`: what the noises and decays of every block come to, at once;
2. `_advance`: the covariance from block to block, noting P k~ of every token (on Hopper `advance.cu`);
3. `gains`: the gain and the variance of every token from these, of all blocks at once.

What all blocks do at once, `triton_blocks` does by products where decays are one a head, and `triton_tokens` token by
token where they are one a key. Decays never are the exponential of a positive number. Blocks lie in windows of 64
tokens; the backward pass starts from a covariance at the entry of each. Covariances too wide for a program's registers
are for `triton_wide`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.dense import triton_blocks, triton_tokens
from kalmix.kernels.dense.cuda import on_hopper
from kalmix.kernels.dense.triton_parts import (
    COUNTS,
    Launch,
    chain_warps,
    decay_kind,
    faded,
    inverse_cholesky,
    launch,
    narrow_product,
    product,
    splits,
)
from kalmix.kernels.dense.triton_wide import forward_wide
from kalmix.kernels.dense.windows import BLOCK, NARROW, WINDOW, padded
from kalmix.kernels.primitives.triton_tiles import cut_tokens, rows, run_of
from kalmix.segments import Segments


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
    shape |= {"VARIANCE": variance}
    if kind == 2:  # decays one a key
        stages, options = triton_tokens, triton_tokens.options(lanes) | shape
    else:
        stages, options = triton_blocks, triton_blocks.options(kind, lanes) | shape

    def scratch(*sizes: int) -> Tensor:
        return torch.empty(blocks, heads, *sizes, **like)

    keys, noises, projected = (scratch(BLOCK, lanes) for _ in range(3))
    queries, asked = (scratch(BLOCK, lanes) if variance else keys for _ in range(2))
    innovations, edges = scratch(BLOCK, BLOCK), scratch(2, lanes)
    strides = (*q.stride()[1:3], *k.stride()[1:3])
    steps = []
    steps.append(Launch(stages.prepare, (blocks, heads), (
        q, k, obs_noise, process_noise, logs, keys, queries, noises, innovations, edges, cut.table, length, cut.tiles,
        *strides, heads, heads // shared,
    ), options))  # fmt: skip
    last = torch.empty(covariance.shape, **like)
    chain = {"KEEP": kept.numel() > 0, "SPLIT": splits(), "num_warps": chain_warps(lanes), "num_stages": 1, **shape}
    steps.append(Launch(on_hopper("advance", _advance, k, lanes), (cut.sequences, heads), (
        obs_noise.float(), keys, queries, noises, innovations, edges, covariance, projected, asked, kept, last,
        cut.runs, length, cut.tiles, *covariance.stride(), heads,
    ), chain | {"DECAY": kind}))  # fmt: skip
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment write nothing
    gain = tokens(batch, length, heads, width, **like)
    scale = torch.empty(batch, length, heads, **like)
    read = tokens(batch, length, heads, 1, **like) if variance else torch.empty(0, **like)
    steps.append(Launch(stages.gains, (blocks, heads), (
        q, k, obs_noise, process_noise, logs, projected, asked, gain, scale, read, cut.table, length, cut.tiles,
        *strides, heads, heads // shared,
    ), options))  # fmt: skip
    launch(steps)
    return gain, read, last, scale
