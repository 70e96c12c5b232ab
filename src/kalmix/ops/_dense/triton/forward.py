"""`dense` in Triton, forward: gains, read-out variance and final covariance; with the gains, the means of `delta`.

The covariance does not see the values, and steps through time in blocks of 16 tokens. With P the covariance that
enters a block, A(t, s) the decay from token s to token t and N_t the process noise gathered since the entry,

    C[t, s] = k~_t' P k~_s + k_t' A(t, s) N_s k_s + [t = s] r_t^2      innovation covariance, k~_t = A(t, entry) k_t
    G[s]    = A(exit, entry) P k~_s + A(exit, s) N_s k_s
    P'      = A P A + N - X' X,    X = L^-1 G,    C = L L'

and only P K~' and what follows from it is sequential. So there are three launches:

1. `prepare`: what the noises and decays of every block come to, at once;
2. `_advance`: the covariance from block to block, noting P k~ of every token (in the row "cuda": `cuda/forward.cu`);
3. `gains`: the gain and the variance of every token from these and from L^-1, of all blocks at once.

`_advance` has a program for each sequence and head, so that most of a GPU is idle. So long sequences are cut into
stretches of time: while it advances through one, the gains and means of the one before are found beside it.

What all blocks do at once, `triton_blocks` does by products where decays are one a head, and `triton_tokens` token by
token where they are one a key. Decays never are the exponential of a positive number. Blocks lie in windows of 64
tokens; the backward pass starts from a covariance at the entry of each. Covariances too wide for a program's registers
are for `triton_wide`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import BLOCK, NARROW, WINDOW, padded
from kalmix.ops._dense.cuda.compile import chain as cuda_chain
from kalmix.ops._dense.triton import scalar_decay as triton_blocks
from kalmix.ops._dense.triton import vector_decay as triton_tokens
from kalmix.ops._dense.triton.parts import (
    COUNTS,
    around,
    chain_options,
    decay_kind,
    faded,
    inverse_cholesky,
    narrow_product,
    product,
    splits,
    stretches,
)
from kalmix.ops._dense.triton.wide import forward_wide
from kalmix.ops._linear_memory.triton.forward import Results, blank
from kalmix.ops._linear_memory.triton.forward import forward as filter_tiles
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import Cut, rows, run_of
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
            root = inverse_cholesky(C, tl.min(observed, 0), BLOCK)  # in place of what it comes from
            tl.store(innovations + slot * (BLOCK * BLOCK) + row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], root)
            write = product(seen * reach[:, None] + noise, tl.trans(root), SPLIT)
            state = faded(state, edge, i, j, DECAY)
            spare = spare * reach * reach + tl.load(edge + P + i)
            state -= product(write, tl.trans(write), SPLIT)
    state += tl.where(i[:, None] == j[None, :], spare[:, None], 0.0)
    tl.store(last + (sequence * G + head) * (K * K) + i[:, None] * K + j[None, :], state, mask=inside)


class Kept(NamedTuple):
    """What the backward pass takes: gains `[B, T, G, K]`, in float32 and in the dtype of k, innovation variances
    `[B, T, G]`, and covariances at the entry of windows `[windows, G, P, P]`, or none."""

    gain: Tensor
    rounded: Tensor
    scale: Tensor
    covariances: Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    segments: Segments | None,
    variance: bool,
    size: int,
    kept: Tensor,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, Kept, Results]:
    """Read-out variances `[B, T, G, 1]`, final mean and covariance; what the backward pass takes; means and what theirs
    does. Means are worked on in tiles of `size` tokens; covariances go to `kept` unless it is empty. `cuda` takes
    `cuda/forward.cu` in place of `_advance`."""
    signals, kind = (q, k, obs_noise, process_noise, log_decay), decay_kind(log_decay)
    spans, packed = stretches(k, obs_noise.shape[2], size, kind, segments), segments is not None
    results = blank(k, v, sum(tiles.count for _, tiles in spans), size, True, packed)
    if k.shape[3] > NARROW:
        gain, read, last, scale = forward_wide(*signals, covariance, segments, variance, kept)
        found, ready = Kept(gain, gain.to(k.dtype), scale, kept), [lambda: None]
    else:
        found, read, last, ready = _gains(*signals, covariance, [windows for windows, _ in spans], variance, kept, cuda)
    states = results.states.split([tiles.count for _, tiles in spans])
    for (_, tiles), entering, finish in zip(spans, states, ready, strict=True):
        finish()
        mean = filter_tiles(q, k, v, found.rounded, log_decay, mean, tiles, True, results._replace(states=entering))
    return read, mean, last, found, results


def _gains(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    covariance: Tensor,
    cuts: list[Cut],
    variance: bool,
    kept: Tensor,
    cuda: bool,
) -> tuple[Kept, Tensor, Tensor, list[Callable[[], None]]]:
    """Gains, variances of what is read, and the last covariance, of stretches of time; the first two are there once
    what is returned of their stretch was called."""
    (batch, length, shared, width), heads, lanes = k.shape, obs_noise.shape[2], padded(k.shape[3])
    like, kind, packed = {"dtype": torch.float32, "device": k.device}, decay_kind(log_decay), cuts[0].packed
    tokens = torch.zeros if packed and len(cuts) == 1 else torch.empty  # those outside every segment write nothing
    gain, scale = tokens(batch, length, heads, width, **like), torch.empty(batch, length, heads, **like)
    rounded = gain if k.dtype == torch.float32 else tokens(gain.shape, dtype=k.dtype, device=k.device)
    read = tokens(batch, length, heads, 1, **like) if variance else torch.empty(0, **like)
    q, k = rows(q), rows(k)
    obs_noise, process_noise = obs_noise.contiguous(), process_noise.contiguous()
    logs, observed = k if log_decay is None else log_decay.contiguous(), obs_noise.float()
    orders = (*q.stride()[1:3], *k.stride()[1:3], heads, heads // shared)
    shape = {"K": width, "P": lanes, "BLOCK": BLOCK, "WINDOW": WINDOW, "PACKED": packed, "VARIANCE": variance}
    stages = triton_tokens if kind == 2 else triton_blocks
    of_prepare, of_gains = (stages.options(stage, kind, lanes, splits()) | shape for stage in ("prepare", "gains"))
    across = {"DECAY": kind, "KEEP": kept.numel() > 0, **chain_options(lanes, splits()), **shape}
    ready, advance = [], cuda_chain("forward") if cuda else _advance
    room = kept.split([cut.count for cut in cuts]) if kept.numel() else [kept] * len(cuts)
    for cut, entering in zip(cuts, room, strict=True):
        blocks, sizes = cut.count * (WINDOW // BLOCK), (cut.table, length, cut.tiles, *orders)
        keys, noises, projected = (torch.empty(blocks, heads, BLOCK, lanes, **like) for _ in range(3))
        queries, asked = (torch.empty_like(keys) if variance else keys for _ in range(2))
        innovations = torch.empty(blocks, heads, BLOCK, BLOCK, **like)
        edges, last = torch.empty(blocks, heads, 2, lanes, **like), torch.empty(covariance.shape, **like)
        before = Launch(stages.prepare, (blocks * heads,), (
            q, k, obs_noise, process_noise, logs, keys, queries, noises, innovations, edges, *sizes,
        ), of_prepare)  # fmt: skip
        chain = Launch(advance, (cut.sequences, heads), (
            observed, keys, queries, noises, innovations, edges, covariance, projected, asked, entering, last,
            cut.runs, length, cut.tiles, *covariance.stride(), heads,
        ), across)  # fmt: skip
        after = Launch(stages.gains, (blocks * heads,), (
            q, k, obs_noise, process_noise, logs, innovations, projected, asked, gain, rounded, scale, read, *sizes,
        ), of_gains)  # fmt: skip
        ready.append(around(before, chain, [after], alone=len(cuts) == 1))
        covariance = last
    return Kept(gain, rounded, scale, kept), read, covariance, ready
