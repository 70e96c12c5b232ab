"""Building blocks of the Triton kernels of `dense`: tiles, float32 products, a small Cholesky factorisation."""

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
    NUM_TIME_SPLITS,
    may_split_time,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch, launch_on_side_stream
from kalmix.ops._shared.triton.tiles import UNSPECIALIZED, Tiling, locate_tile, tile_interval, tile_sequences
from kalmix.segments import Segments

UNSPECIALIZED_ARGUMENTS = [
    *UNSPECIALIZED,
    "block_stride",
    "G",
    "SHARE",
]  # arguments whose value does not trigger compilation


def decay_kind(log_decay: Tensor | None) -> int:
    """Return the number of axes of a decay: 0 for no decay, 1 for one per head, 2 for one per key."""
    return 0 if log_decay is None else log_decay.ndim - 2


def launch_overlapped(before: Launch, scan: Launch, after: list[Launch], exclusive: bool) -> Callable[[], None]:
    """Launch `before`, then the sequential kernel `scan` on a side stream, so that it overlaps with later launches.

    Args:
        before: kernel that `scan` depends on.
        scan: sequential kernel, which occupies few multiprocessors.
        after: kernels that depend on `scan`.
        exclusive: launch `scan` on the current stream, if there is nothing to overlap with.

    Returns:
        A function that makes the current stream wait for `scan`, then launches `after`.
    """
    before.run()
    if exclusive:
        scan.run()
        return partial(_run_all, after)
    wait = launch_on_side_stream(scan)

    # The default argument keeps the tensors of the launches alive until then.
    def wait_and_finish(_keep_alive: tuple[Launch, Launch] = (before, scan)) -> None:
        wait()
        _run_all(after)

    return wait_and_finish


def _run_all(steps: list[Launch]) -> None:
    """Launch kernels in order."""
    for step in steps:
        step.run()


def time_splits(
    k: Tensor, heads: int, size: int, decay_axes: int, segments: Segments | None
) -> list[tuple[Tiling, Tiling]]:
    """Split time in intervals, each with the chunks and the tiles of `size` tokens of all sequences.

    The sequential kernel of one interval overlaps with the other kernels of the interval before it. Short or packed
    sequences, wide keys and decays per key have a single interval.
    """
    batch, length = k.shape[:2]
    may_split = may_split_time(batch, length, heads, packed=segments is not None)
    if not may_split or decay_axes == 2 or k.shape[3] > MAX_PROGRAM_WIDTH:
        return [(tile_sequences(batch, length, CHUNK, segments, k), tile_sequences(batch, length, size, segments, k))]
    split_tokens = -(-length // (CHUNK * NUM_TIME_SPLITS)) * CHUNK
    return [
        (tile_interval(*span, CHUNK, k.device), tile_interval(*span, size, k.device))
        for span in (
            (batch, length, start, min(start + split_tokens, length)) for start in range(0, length, split_tokens)
        )
    ]


def split_tiles(x: Tensor, intervals: list[Tiling]) -> tuple[Tensor, ...]:
    """Split a flat tensor that has equally many elements for each tile into the tiles of each interval."""
    counts = [tiling.num_tiles for tiling in intervals]
    tiles = x.view(sum(counts), -1)
    return tiles.split(counts) if len(counts) > 1 else (tiles,)


def reduce_to_inputs(
    grads: tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor], dtypes: list[torch.dtype], key_heads: int
) -> list[Tensor]:
    """Convert gradients per value head to those of q (empty if there is none), k and the rest, in the given dtypes."""
    grad_q, grad_k, *others = grads

    def sum_over_group(grad: Tensor) -> Tensor:
        return grad if grad.shape[2] == key_heads else grad.unflatten(2, (key_heads, -1)).sum(3)

    grad_query = grad_k.new_empty(0) if grad_q is None else sum_over_group(grad_q)
    return [x.to(dtype) for x, dtype in zip((grad_query, sum_over_group(grad_k), *others), dtypes, strict=True)]


def bf16_terms(output_dtype: torch.dtype = torch.float32) -> int:
    """Return the number of bfloat16 terms into which products split a float32 factor on tensor cores; 0 without.

    Three terms are exact. Two terms, with 16 bits, suffice where the result is stored in half precision.
    """
    tensor_cores = torch.version.cuda is not None and not knobs.runtime.interpret
    return 0 if not tensor_cores else 3 if output_dtype == torch.float32 else 2


@triton.jit
def tile_in_chunk(tile_table, index, length, tiles, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return the first token of a tile in the batch (int64), and its token count; none if the chunk ends before it."""
    first = index % (CHUNK // TILE) * TILE
    token, count = locate_tile(tile_table, index // (CHUNK // TILE), length, tiles, CHUNK, PACKED)
    return token + first, tl.minimum(count - first, TILE)


@triton.jit
def split_bf16(x, TERMS: tl.constexpr):
    """Split a factor in bfloat16 terms whose sum it is; a bfloat16 factor is its own term."""
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
    """Return a b (+ c) in float32, from products of bfloat16 terms without the smallest, or directly if `TERMS` is 0.

    Add the result to a large number afterwards: tensor cores drop bits below the last bit of the sum so far.
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
    """Return a b of `[TILE, P]` and `[P, TILE]`; every warp sums a slice of P."""
    SLICES: tl.constexpr = P // 16
    a = tl.permute(tl.reshape(a, (TILE, SLICES, 16)), (1, 0, 2))
    partials = split_matmul(a, tl.reshape(b, (SLICES, 16, TILE)), TERMS)
    return tl.sum(partials, 0)


@triton.jit
def decay_covariance(state, tile_decay, i, j, DECAY: tl.constexpr):
    """Apply the decays at `tile_decay` to the rows and columns of a covariance `[keys, keys]`."""
    if DECAY == 2:
        state = state * tl.load(tile_decay + i)[:, None] * tl.load(tile_decay + j)[None, :]
    elif DECAY == 1:
        decay = tl.load(tile_decay)
        state *= decay * decay
    return state


@triton.jit
def swap_pairs(x, P: tl.constexpr):
    """Exchange entries 2 j and 2 j + 1 of a vector `[P]`."""
    even, odd = tl.split(tl.reshape(x, (P // 2, 2)))
    return tl.reshape(tl.join(odd, even), (P,))


@triton.jit
def load_noise_blocks(process_noise, noise_axis, position, dim, K: tl.constexpr, PAIRED: tl.constexpr):
    """Load the process noise of a token: of every key with itself, and with its partner.

    Unless `PAIRED`, both are the noise of every key, a scalar.
    """
    noise = tl.load(process_noise + position).to(tl.float32)
    if PAIRED:
        axis = tl.load(noise_axis + position * K + dim, mask=dim < K, other=0.0)
        partner = tl.load(noise_axis + position * K + (dim ^ 1), mask=dim < K, other=0.0)
        blocks = noise * (axis * axis), noise * (axis * partner)
    else:
        blocks = noise, noise
    return blocks


@triton.jit
def add_noise_blocks(state, noise, pair_noise, i, j, PAIRED: tl.constexpr):
    """Add process noise to the diagonal of a covariance `[keys, keys]` and, if `PAIRED`, to the entries of partners."""
    state += tl.where(i[:, None] == j[None, :], noise[:, None], 0.0)
    if PAIRED:
        state += tl.where((i ^ 1)[:, None] == j[None, :], pair_noise[:, None], 0.0)
    return state


@triton.jit
def masked_sum(x, mask):
    """Return the sum of the entries of `x` where `mask` is true."""
    return tl.sum(tl.where(mask, x, 0.0), 0)


@triton.jit
def invert_ldl(C, floor, TILE: tl.constexpr):
    """Return U^-1 and s of C = U diag(s) U', with U unit lower triangular `[TILE, TILE]` and s at least `floor`.

    Elimination proceeds four rows at a time: six numbers eliminate within the four, four outer products eliminate in
    the rows below. Row V of U^-1 replaces the row that it eliminated; f holds the multiples subtracted from the rows
    below.
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
    """Return L^-1 of C = L L', `[TILE, TILE]`; pivots are at least `floor`, the smallest noise."""
    unit, pivots = invert_ldl(C, floor, TILE)
    return unit * (1.0 / tl.sqrt(pivots))[:, None]


def scan_options(padded: int, terms: int) -> dict[str, int]:
    """Return the launch options of a sequential kernel."""
    return {"TERMS": terms, "num_warps": 8 if padded > 64 else 4, "num_stages": 1}
