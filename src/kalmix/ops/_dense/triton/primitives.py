"""What the Triton kernels of `dense` are made of: blocks of tokens, products in float32, a small Cholesky factor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kalmix.ops._dense.block_sizes import (
    CHUNK,
    MAX_PROGRAM_WIDTH,
    MIN_SPLIT_TOKENS,
    NUM_TIME_SPLITS,
    SPLIT_PROGRAM_COUNTS,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch, launch_on_side_stream
from kalmix.ops._shared.triton.tiles import UNSPECIALIZED, Tiling, locate_tile, tile_interval, tile_sequences
from kalmix.segments import Segments

UNSPECIALIZED = [*UNSPECIALIZED, "block_stride", "G", "SHARE"]  # numbers that must not compile a kernel anew


def decay_kind(log_decay: Tensor | None) -> int:
    """0 for no decay, 1 for one a head, 2 for one a key."""
    return 0 if log_decay is None else log_decay.ndim - 2


def launch_overlapped(before: Launch, scan: Launch, after: list[Launch], exclusive: bool) -> Callable[[], None]:
    """Run what comes before a chain, and the chain beside what the current stream has to do from then on, unless it is
    alone; the result, once called, has the stream wait for it and runs what comes after."""
    before.run()
    if exclusive:
        scan.run()
        return partial(_run_all, after)
    wait = launch_on_side_stream(scan)

    def wait_and_finish(
        _keep_alive: tuple[Launch, Launch] = (before, scan),
    ) -> None:  # what they work on is not given away until then
        wait()
        _run_all(after)

    return wait_and_finish


def _run_all(steps: list[Launch]) -> None:
    for step in steps:
        step.run()


def time_splits(
    k: Tensor, heads: int, size: int, decay_axes: int, segments: Segments | None
) -> list[tuple[Tiling, Tiling]]:
    """Windows of all sequences and tiles of `size` tokens: of one stretch of time after another, so that chains of the
    next run beside what follows those of this one."""
    batch, length = k.shape[:2]
    single = segments is not None or length < MIN_SPLIT_TOKENS or batch * heads not in SPLIT_PROGRAM_COUNTS
    if single or decay_axes == 2 or k.shape[3] > MAX_PROGRAM_WIDTH:
        return [(tile_sequences(batch, length, CHUNK, segments, k), tile_sequences(batch, length, size, segments, k))]
    split_tokens = -(-length // (CHUNK * NUM_TIME_SPLITS)) * CHUNK
    return [
        (tile_interval(*span, CHUNK, k.device), tile_interval(*span, size, k.device))
        for span in (
            (batch, length, start, min(start + split_tokens, length)) for start in range(0, length, split_tokens)
        )
    ]


def reduce_to_inputs(
    grads: tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor], dtypes: list[torch.dtype], key_heads: int
) -> list[Tensor]:
    """Gradients a value head as those of q (empty if there is none), k and the rest: summed over groups, in dtypes."""
    grad_q, grad_k, *others = grads

    def sum_over_group(grad: Tensor) -> Tensor:
        return grad if grad.shape[2] == key_heads else grad.unflatten(2, (key_heads, -1)).sum(3)

    grad_query = grad_k.new_empty(0) if grad_q is None else sum_over_group(grad_q)
    return [x.to(dtype) for x, dtype in zip((grad_query, sum_over_group(grad_k), *others), dtypes, strict=True)]


def bf16_terms(output_dtype: torch.dtype = torch.float32) -> int:
    """Of how many bfloat16 a factor is the sum, where tensor cores take them: of three to the last bit, or, of what
    ends in half precision, of two to 16 bits."""
    tensor_cores = torch.version.cuda is not None and not knobs.runtime.interpret
    return 0 if not tensor_cores else 3 if output_dtype == torch.float32 else 2


@triton.jit
def tile_in_chunk(tile_table, index, length, tiles, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """A block's first token in the batch (int64), and its tokens; none if its window ends before it."""
    first = index % (CHUNK // TILE) * TILE
    token, count = locate_tile(tile_table, index // (CHUNK // TILE), length, tiles, CHUNK, PACKED)
    return token + first, tl.minimum(count - first, TILE)


@triton.jit
def split_bf16(x, TERMS: tl.constexpr):
    """The bfloat16 that add up to a factor, if it is not one, in registers as the sums of products are."""
    if x.dtype == tl.bfloat16:
        terms = (x,)
    else:
        x = x.to(tl.float32)
        terms = ()
        for _ in tl.static_range(TERMS):
            bits = x.to(tl.uint32, bitcast=True)
            terms += ((bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True),)
            x -= (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return terms


@triton.jit
def split_matmul(a, b, TERMS: tl.constexpr, c=None):
    """a b (+ c) in float32: from bfloat16 parts, all but the least of their products, or straight.

    Add it to a large number afterwards: tensor cores drop what lies below the last bit of the sum so far.
    """
    if TERMS:
        terms_a, terms_b = split_bf16(a, TERMS), split_bf16(b, TERMS)
        for order in tl.static_range(TERMS):
            for i in tl.static_range(TERMS - order):
                if (TERMS - 1 - order - i < len(terms_a)) and (i < len(terms_b)):
                    c = tl.dot(terms_a[TERMS - 1 - order - i], terms_b[i], c)
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    return c


@triton.jit
def product_across_warps(a, b, TERMS: tl.constexpr, TILE: tl.constexpr, P: tl.constexpr):
    """a b of `[BLOCK, P]` and `[P, BLOCK]`, every warp summing a part of P."""
    SLICES: tl.constexpr = P // 16
    a = tl.permute(tl.reshape(a, (TILE, SLICES, 16)), (1, 0, 2))
    partials = split_matmul(a, tl.reshape(b, (SLICES, 16, TILE)), TERMS)
    return tl.sum(partials, 0)


@triton.jit
def decay_covariance(state, tile_decay, i, j, DECAY: tl.constexpr):
    """A state `[keys, keys]` after a block whose decays lie at `edge`."""
    if DECAY == 2:
        state = state * tl.load(tile_decay + i)[:, None] * tl.load(tile_decay + j)[None, :]
    elif DECAY == 1:
        decay = tl.load(tile_decay)
        state *= decay * decay
    return state


@triton.jit
def masked_sum(x, mask):
    return tl.sum(tl.where(mask, x, 0.0), 0)


@triton.jit
def invert_ldl(C, floor, TILE: tl.constexpr):
    """U^-1 and s of C = U diag(s) U', U unit lower triangular `[BLOCK, BLOCK]`; no pivot in s lies below `floor`.

    Four rows at a time: what they do to each other takes six numbers, what they do to the rest four products. A row
    V of the result so far is in place of what it eliminated; f says how often it is taken from the rows below.
    """
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    line = tl.arange(0, TILE)
    pivots = tl.zeros([TILE], tl.float32)
    for j in range(0, TILE, 4):
        g0 = tl.sum(tl.where(column == j, C, 0.0), 1)
        g1 = tl.sum(tl.where(column == j + 1, C, 0.0), 1)
        g2 = tl.sum(tl.where(column == j + 2, C, 0.0), 1)
        g3 = tl.sum(tl.where(column == j + 3, C, 0.0), 1)
        active = (line >= j) & (line < j + 4)
        v0 = tl.where(active, (line == j).to(tl.float32), tl.sum(tl.where(row == j, C, 0.0), 0))
        v1 = tl.where(active, (line == j + 1).to(tl.float32), tl.sum(tl.where(row == j + 1, C, 0.0), 0))
        v2 = tl.where(active, (line == j + 2).to(tl.float32), tl.sum(tl.where(row == j + 2, C, 0.0), 0))
        v3 = tl.where(active, (line == j + 3).to(tl.float32), tl.sum(tl.where(row == j + 3, C, 0.0), 0))
        d0 = tl.maximum(masked_sum(g0, line == j), floor)
        c10, c20, c30 = masked_sum(g0, line == j + 1), masked_sum(g0, line == j + 2), masked_sum(g0, line == j + 3)
        c21, c31, c32 = masked_sum(g1, line == j + 2), masked_sum(g1, line == j + 3), masked_sum(g2, line == j + 3)
        d1, d2, d3 = masked_sum(g1, line == j + 1), masked_sum(g2, line == j + 2), masked_sum(g3, line == j + 3)
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
    return tl.where(row > column, C, tl.where(row == column, 1.0, 0.0)), pivots


@triton.jit
def inverse_cholesky(C, floor, TILE: tl.constexpr):
    """L^-1 of C = L L', `[BLOCK, BLOCK]`; no pivot lies below the least noise, `floor`."""
    unit, pivots = invert_ldl(C, floor, TILE)
    return unit * (1.0 / tl.sqrt(pivots))[:, None]


def scan_options(padded: int, terms: int) -> dict[str, int]:
    """How a chain is compiled."""
    return {"TERMS": terms, "num_warps": 8 if padded > 64 else 4, "num_stages": 1}
