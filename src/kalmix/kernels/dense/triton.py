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
lie in windows of 64 tokens; the backward pass starts from a covariance at the entry of each.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kalmix.kernels.dense.windows import BLOCK, WINDOW, padded
from kalmix.kernels.primitives.triton_tiles import LOOSE, cut_tokens, rows, run_of, tile_of
from kalmix.segments import Segments

COUNTS = [*LOOSE, "G", "SHARE"]  # numbers that must not compile a kernel anew


def decay_kind(log_decay: Tensor | None) -> int:
    """0 for no decay, 1 for one a head, 2 for one a key."""
    return 0 if log_decay is None else log_decay.ndim - 2


class Launch(NamedTuple):
    """A kernel to run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


_COMPILED: set[Any] = set()


def launch(steps: list[Launch]) -> None:
    """Run kernels one after another; new ones are compiled first, side by side, or the first call would take long."""
    types = [[x.dtype for x in step.arguments if isinstance(x, Tensor)] for step in steps]
    new = tuple((id(x.kernel), *x.options.values(), *kinds) for x, kinds in zip(steps, types, strict=True))
    if new not in _COMPILED and not knobs.runtime.interpret:
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
            for kernel, grid, arguments, options in steps:
                kernel.warmup(*arguments, grid=grid, **options)
        _COMPILED.add(new)
    for kernel, grid, arguments, options in steps:
        kernel[grid](*arguments, **options)


def splits() -> bool:
    """Whether tensor cores that take bfloat16 are there to use."""
    return torch.version.cuda is not None and not knobs.runtime.interpret


@triton.jit
def block_of(table, index, length, tiles, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr):
    """A block's first token in the batch (int64), and its tokens; none if its window ends before it."""
    first = index % (WINDOW // BLOCK) * BLOCK
    token, count = tile_of(table, index // (WINDOW // BLOCK), length, tiles, WINDOW, PACKED)
    return token + first, tl.minimum(count - first, BLOCK)


@triton.jit
def decay_of(log_decay, at, lane, K: tl.constexpr, P: tl.constexpr, DECAY: tl.constexpr):
    """Decay of one token, `[P]`."""
    if DECAY == 2:
        logs = tl.load(log_decay + at * K + lane, mask=lane < K, other=0.0).to(tl.float32)
    elif DECAY == 1:
        logs = tl.load(log_decay + at).to(tl.float32) + tl.zeros([P], tl.float32)
    else:
        logs = tl.zeros([P], tl.float32)
    return tl.exp(logs)


@triton.jit
def thirds(x):
    """A float32 as the sum of three bfloat16, whose layout in registers is that of the sums of products."""
    bits = x.to(tl.uint32, bitcast=True)
    first = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    x -= (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    second = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    x -= (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    third = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return first, second, third


@triton.jit
def product(a, b, SPLIT: tl.constexpr, c=None):
    """a b (+ c) in float32: from bfloat16 thirds, all but the three least of their nine products, or straight.

    Add it to a large number afterwards: tensor cores drop what lies below the last bit of the sum so far.
    """
    if SPLIT:
        a1, a2, a3 = thirds(a)
        b1, b2, b3 = thirds(b)
        c = tl.dot(a3, b1, c)
        c = tl.dot(a2, b2, c)
        c = tl.dot(a1, b3, c)
        c = tl.dot(a2, b1, c)
        c = tl.dot(a1, b2, c)
        c = tl.dot(a1, b1, c)
    else:
        c = tl.dot(a, b, c, input_precision="ieee")
    return c


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


@triton.jit
def narrow_product(a, b, SPLIT: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    """a b of `[BLOCK, P]` and `[P, BLOCK]`, every warp summing a part of P."""
    PARTS: tl.constexpr = P // 16
    a = tl.permute(tl.reshape(a, (BLOCK, PARTS, 16)), (1, 0, 2))
    parts = product(a, tl.reshape(b, (PARTS, 16, BLOCK)), SPLIT)
    return tl.sum(parts, 0)


@triton.jit
def faded(state, edge, i, j, DECAY: tl.constexpr):
    """A state `[keys, keys]` after a block whose decays lie at `edge`."""
    if DECAY == 2:
        state = state * tl.load(edge + i)[:, None] * tl.load(edge + j)[None, :]
    elif DECAY == 1:
        all_keys = tl.load(edge)
        state *= all_keys * all_keys
    return state


@triton.jit
def pick(x, where_true):
    return tl.sum(tl.where(where_true, x, 0.0), 0)


@triton.jit
def inverse_cholesky(C, floor, BLOCK: tl.constexpr):
    """L^-1 of C = L L', `[BLOCK, BLOCK]`, by elimination in place; no pivot lies below the least noise, `floor`.

    Four rows at a time: what they do to each other takes six numbers, what they do to the rest four products. A row
    V of the result so far is in place of what it eliminated; f says how often it is taken from the rows below.
    """
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    line = tl.arange(0, BLOCK)
    pivots = tl.zeros([BLOCK], tl.float32)
    for j in range(0, BLOCK, 4):
        g0 = tl.sum(tl.where(column == j, C, 0.0), 1)
        g1 = tl.sum(tl.where(column == j + 1, C, 0.0), 1)
        g2 = tl.sum(tl.where(column == j + 2, C, 0.0), 1)
        g3 = tl.sum(tl.where(column == j + 3, C, 0.0), 1)
        inside = (line >= j) & (line < j + 4)
        v0 = tl.where(inside, (line == j).to(tl.float32), tl.sum(tl.where(row == j, C, 0.0), 0))
        v1 = tl.where(inside, (line == j + 1).to(tl.float32), tl.sum(tl.where(row == j + 1, C, 0.0), 0))
        v2 = tl.where(inside, (line == j + 2).to(tl.float32), tl.sum(tl.where(row == j + 2, C, 0.0), 0))
        v3 = tl.where(inside, (line == j + 3).to(tl.float32), tl.sum(tl.where(row == j + 3, C, 0.0), 0))
        d0 = tl.maximum(pick(g0, line == j), floor)
        c10, c20, c30 = pick(g0, line == j + 1), pick(g0, line == j + 2), pick(g0, line == j + 3)
        c21, c31, c32 = pick(g1, line == j + 2), pick(g1, line == j + 3), pick(g2, line == j + 3)
        d1, d2, d3 = pick(g1, line == j + 1), pick(g2, line == j + 2), pick(g3, line == j + 3)
        i0 = 1.0 / d0
        l10, l20, l30 = c10 * i0, c20 * i0, c30 * i0
        d1 = tl.maximum(d1 - l10 * c10, floor)
        i1 = 1.0 / d1
        c21, c31 = c21 - l20 * c10, c31 - l30 * c10
        l21, l31 = c21 * i1, c31 * i1
        d2 = tl.maximum(d2 - l20 * c20 - l21 * c21, floor)
        i2 = 1.0 / d2
        c32 = c32 - l30 * c20 - l31 * c21
        l32 = c32 * i2
        d3 = tl.maximum(d3 - l30 * c30 - l31 * c31 - l32 * c32, floor)
        v1 -= l10 * v0
        v2 -= l20 * v0 + l21 * v1
        v3 -= l30 * v0 + l31 * v1 + l32 * v2
        f0 = tl.where(line > j, g0 * i0, 0.0)
        f1 = tl.where(line > j + 1, (g1 - f0 * c10) * i1, 0.0)
        f2 = tl.where(line > j + 2, (g2 - f0 * c20 - f1 * c21) * i2, 0.0)
        f3 = tl.where(line > j + 3, (g3 - f0 * c30 - f1 * c31 - f2 * c32) * (1.0 / d3), 0.0)
        C = tl.where((column >= j) & (column < j + 4) & (row > column), 0.0, C)
        C -= f0[:, None] * v0[None, :] + f1[:, None] * v1[None, :]
        C -= f2[:, None] * v2[None, :] + f3[:, None] * v3[None, :]
        pivots = tl.where(line == j, d0, tl.where(line == j + 1, d1, pivots))
        pivots = tl.where(line == j + 2, d2, tl.where(line == j + 3, d3, pivots))
    unit = tl.where(row > column, C, tl.where(row == column, 1.0, 0.0))
    return unit * (1.0 / tl.sqrt(pivots))[:, None]


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
    ), dict(num_warps=1, **shape)))  # fmt: skip
    last = torch.empty(covariance.shape, **like)
    steps.append(Launch(_advance, (cut.sequences, heads), (
        obs_noise, keys, queries, noises, innovations, edges, covariance, projected, asked, kept, last, cut.runs,
        length, cut.tiles, *covariance.stride(), heads,
    ), dict(KEEP=kept.numel() > 0, SPLIT=splits(), num_warps=chain_warps(lanes), num_stages=1, **shape)))  # fmt: skip
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment write nothing
    gain = tokens(batch, length, heads, width, **like)
    scale = torch.empty(batch, length, heads, **like)
    read = tokens(batch, length, heads, 1, **like) if variance else torch.empty(0, **like)
    steps.append(Launch(_gains, (blocks, heads), (
        q, k, obs_noise, process_noise, logs, projected, asked, gain, scale, read, cut.table, length, cut.tiles,
        *strides, heads, heads // shared,
    ), dict(num_warps=1, **shape)))  # fmt: skip
    launch(steps)
    return gain, read, last, scale


def chain_warps(lanes: int) -> int:
    """Warps that share a covariance."""
    return 8 if lanes > 64 else 4
