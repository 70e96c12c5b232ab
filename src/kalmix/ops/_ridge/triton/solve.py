"""Triton solvers for all tokens of a tile at once, and helpers that all Triton kernels of `ridge` share.

An iteration stores the solution x, a direction d and the residual r. Directions are truncated to the dtype of the
inputs, and r is updated with the truncated direction. So later steps correct truncation errors, and only the rounding
of H at the entry of the tile remains.

With A(t, s) the decay from token s to token t and H_0 the matrix H at the entry of the tile, rows d_t are multiplied by
the systems S_t of their tokens as

    S d = A(t, entry) d H_0 + ((d k') A(t, s) g_s)_{s <= t} k + ridge_t d
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._ridge.tiles import scan_columns
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import (
    FIRST_TILE,
    LAST_TILE,
    UNSPECIALIZED,
    Tiling,
    boundary_index,
    dot_precision,
    has_neighbour,
    load_per_token,
    locate_program,
    locate_tile,
    matmul,
    tile_sequences,
)
from kalmix.ops._shared.widths import padded_width
from kalmix.segments import segments_without_checks

MIN_ENTRY_DECAY = tl.constexpr(1e-26)  # H_0 counts as 0 below this decay
MIN_LOG_DECAY = tl.constexpr(-1e4)  # smaller log-decays are replaced by this; exp of it is 0


class LaunchPlan(NamedTuple):
    """Tiles of a call, and the grids and options with which its kernels are launched.

    Attributes:
        cut: tiles of all sequences.
        heads: number of value heads.
        grid: one program per tile and head.
        tiles: arguments with which a kernel finds its tile.
        group_size: value heads per key head.
        column_blocks: number of column blocks of H, and of H and U together.
        constants: constants of all kernels.
        solve_options: launch options of kernels that process all tiles in parallel.
        scan_options: launch options of kernels that step from tile to tile, one program per column block.
    """

    cut: Tiling
    heads: int
    grid: tuple[int]
    tiles: tuple[Any, ...]
    group_size: int
    column_blocks: tuple[int, int]
    constants: dict[str, Any]
    solve_options: dict[str, int]
    scan_options: dict[str, int]


def launch_plan(k: Tensor, v: Tensor, segments: Tensor | None, size: int) -> LaunchPlan:
    """Choose tiles, grids and launch options from sizes and dtypes; `segments` are the rows of `Segments`."""
    (batch, length, key_heads, width), (heads, values) = k.shape, v.shape[2:]
    cut = tile_sequences(batch, length, size, None if segments is None else segments_without_checks(segments), k)
    padded = padded_width(width)
    columns = scan_columns(cut.num_sequences, heads, padded)
    column_blocks = -(-width // columns)
    constants = {"K": width, "V": values, "P": padded, "SIZE": size, "PACKED": segments is not None}
    solve_options = {"num_warps": 4 if padded <= 128 else 8, "num_stages": 1}
    pipelined = k.dtype == torch.bfloat16 and width % 4 == 0  # as in `_linear_memory`
    scan_options = {"COLUMNS": columns, "STAGES": 2 if pipelined else 1, "num_warps": 4}
    return LaunchPlan(
        cut=cut,
        heads=heads,
        grid=(cut.num_tiles * heads,),
        tiles=(cut.tile_table, length, cut.tiles),
        group_size=heads // key_heads,
        column_blocks=(column_blocks, column_blocks + -(-values // columns)),
        constants=constants | {"PRECISION": dot_precision(k.dtype)},
        solve_options=solve_options,
        scan_options=scan_options,
    )


def value_block(plan: LaunchPlan, shared: int) -> int:
    """Return the number of value columns that a program with `shared` bytes of shared memory processes at a time."""
    return 64 if plan.constants["V"] <= 64 or plan.constants["P"] > 128 or shared < 160 * 1024 else 128


@triton.constexpr_function
def divides(width, block):
    """Return whether `block` divides `width`."""
    return width % block == 0


@triton.jit
def load_block(base, row, column, K: tl.constexpr, V: tl.constexpr, stored=None):
    """Load a block of a contiguous matrix `[K, V]`; 0 outside the matrix, and unless `stored`, if it is given."""
    token_start = base + row[:, None] * V + column[None, :]
    if stored is not None:
        block = tl.load(token_start, mask=(row < K)[:, None] & (column < V)[None, :] & stored, other=0.0)
    elif divides(K, row.shape[0]) and divides(V, column.shape[0]):
        block = tl.load(token_start)
    else:
        block = tl.load(token_start, mask=(row < K)[:, None] & (column < V)[None, :], other=0.0)
    return block


@triton.jit
def load_state(base, row, column, stride, step, K: tl.constexpr, V: tl.constexpr):
    """Load a block of a matrix `[K, V]` with any strides; 0 outside the matrix."""
    in_bounds = (row < K)[:, None] & (column < V)[None, :]
    return tl.load(base + row[:, None] * stride + column[None, :] * step, mask=in_bounds, other=0.0)


@triton.jit
def store_block(base, row, column, x, K: tl.constexpr, V: tl.constexpr, stored=None):
    """Store a block of a contiguous matrix `[K, V]`; nothing unless `stored`, if it is given."""
    token_start, x = base + row[:, None] * V + column[None, :], x.to(base.dtype.element_ty)
    if stored is not None:
        tl.store(token_start, x, mask=(row < K)[:, None] & (column < V)[None, :] & stored)
    elif divides(K, row.shape[0]) and divides(V, column.shape[0]):
        tl.store(token_start, x)
    else:
        tl.store(token_start, x, mask=(row < K)[:, None] & (column < V)[None, :])


@triton.jit
def load_token_scalars(base, slot, SIZE: tl.constexpr):
    """Load one number per token of a tile, `[SIZE]`, from `[slots, SIZE]`."""
    return tl.load(base + slot * SIZE + tl.arange(0, SIZE))


@triton.jit
def store_token_scalars(base, slot, x):
    """Store one number per token of a tile in `[slots, SIZE]`."""
    SIZE: tl.constexpr = x.shape[0]
    tl.store(base + slot * SIZE + tl.arange(0, SIZE), x)


@triton.jit
def program_tile(tile_table, length, tiles, G, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Return a program's head, and of its tile the first token, token count, row in `[B * T * G]` and slot."""
    index, head, _part = locate_program(G, 1)
    token, count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    return head, token, count, token * G + head, index.to(tl.int64) * G + head


@triton.jit
def locate_entry(tile_table, slot, token, G, SIZE: tl.constexpr):
    """Return the index of H and U at the entry of a tile, and whether they are stored: not before the first tile."""
    index, head = slot // G, slot % G
    return boundary_index(token, SIZE) * G + head, has_neighbour(tile_table, index, FIRST_TILE)


@triton.jit
def locate_exit(tile_table, slot, token, G, SIZE: tl.constexpr):
    """Return the index of adjoints at the exit of a tile, and whether they are stored: not after the last tile."""
    index, head = slot // G, slot % G
    return boundary_index(token + SIZE, SIZE) * G + head, has_neighbour(tile_table, index, LAST_TILE)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def compute_decays(
    log_decay, gain, log_decays, log_decay_remainders, entry_decays, exit_weights, weights, tile_decays, tile_table,
    length, tiles, G, SIZE: tl.constexpr, PACKED: tl.constexpr, DECAY: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Compute decays and weights of the tokens of a tile.

    Stores the log-decay from the entry to each token t as a sum of two float32, A(t, entry), g_t A(exit, t), g_t and
    A(exit, entry).
    """
    _head, _token, count, row, slot = program_tile(tile_table, length, tiles, G, SIZE, PACKED)
    exit_weight = tl.full([SIZE], 1.0, tl.float32)
    if DECAY:
        token_log_decay = load_per_token(log_decay + row, count, G, SIZE)
        # A larger magnitude would leave no digits in the sums for small log-decays.
        token_log_decay = tl.maximum(token_log_decay, MIN_LOG_DECAY).to(tl.float64)
        cumulative, total = tl.cumsum(token_log_decay, 0), tl.sum(token_log_decay, 0)
        high = cumulative.to(tl.float32)
        store_token_scalars(log_decays, slot, high)
        store_token_scalars(log_decay_remainders, slot, (cumulative - high.to(tl.float64)).to(tl.float32))
        store_token_scalars(entry_decays, slot, tl.exp(high))
        tl.store(tile_decays + slot, tl.exp(total.to(tl.float32)))
        exit_weight = tl.exp((total - cumulative).to(tl.float32))
    if GAIN:
        gains = load_per_token(gain + row, count, G, SIZE)
        store_token_scalars(weights, slot, gains)
        exit_weight *= gains
    store_token_scalars(exit_weights, slot, exit_weight)


class DecayTables(NamedTuple):
    """Output of `compute_decays`: one number per token, `[tiles, heads, SIZE]`."""

    log_decays: Tensor
    log_decay_remainders: Tensor
    entry_decays: Tensor
    exit_weights: Tensor
    weights: Tensor
    tile_decays: Tensor  # [tiles, heads]


def decay_tables(plan: LaunchPlan, log_decay: Tensor | None, gain: Tensor | None, placeholder: Tensor) -> DecayTables:
    """Launch `compute_decays`; return placeholders if the call has neither decays nor gains."""
    if log_decay is None and gain is None:
        return DecayTables(*[placeholder] * 6)
    size = plan.cut.size
    tables = torch.empty(5, plan.cut.num_tiles, plan.heads, size, dtype=torch.float32, device=placeholder.device)
    tile_decays = torch.empty(plan.cut.num_tiles, plan.heads, dtype=torch.float32, device=placeholder.device)
    inputs = (placeholder if x is None else x.contiguous() for x in (log_decay, gain))
    options = {"DECAY": log_decay is not None, "GAIN": gain is not None, "PACKED": plan.constants["PACKED"]}
    arguments = (*inputs, *tables, tile_decays, *plan.tiles, plan.heads)
    Launch(compute_decays, plan.grid, arguments, {"SIZE": size, "num_warps": 1, **options}).run()
    return DecayTables(*tables, tile_decays)


@triton.jit
def log_decay_between(log_decays, log_decay_remainders, slot, SIZE: tl.constexpr):
    """Return the log-decay from token s to token t, `[t, s]`, accurate as a float64 difference; above 0 for t < s."""
    high, low = load_token_scalars(log_decays, slot, SIZE), load_token_scalars(log_decay_remainders, slot, SIZE)
    return (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])


@triton.jit
def causal_decays(
    log_decays,
    log_decay_remainders,
    entry_decays,
    weights,
    slot,
    SIZE: tl.constexpr,
    DECAY: tl.constexpr,
    GAIN: tl.constexpr,
):
    """Return A(t, s) `[t, s]` (0 for t < s), gains and A(t, entry) of a tile."""
    t = tl.arange(0, SIZE)
    decays = tl.where(t[:, None] >= t[None, :], 1.0, 0.0)
    gain, entry_decay = tl.full([SIZE], 1.0, tl.float32), tl.full([SIZE], 1.0, tl.float32)
    if DECAY:
        decays = tl.exp(
            tl.where(
                t[:, None] >= t[None, :], log_decay_between(log_decays, log_decay_remainders, slot, SIZE), float("-inf")
            )
        )
        entry_decay = load_token_scalars(entry_decays, slot, SIZE)
    if GAIN:
        gain = load_token_scalars(weights, slot, SIZE)
    return decays, gain, entry_decay


@triton.jit
def row_dot(a, b, PRECISION: tl.constexpr):
    """Return a_t'b_t of every token, by a matrix product in half precision, since the rows have other layouts."""
    if b.dtype == tl.float32:
        return tl.sum(a * b, 1)
    return diagonal(matmul(a.to(b.dtype), tl.trans(b), PRECISION))


@triton.jit
def diagonal(x):
    """Return the diagonal of a square matrix."""
    t = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(t[:, None] == t[None, :], x, 0.0), 1)


@triton.jit
def apply_systems(directions, gram, k, weights, initial, PRECISION: tl.constexpr):
    """Return `initial` + d H_0 + ((d k') weights) k, for rows d in the dtype of `gram`."""
    DTYPE: tl.constexpr = gram.dtype
    initial = matmul(directions, gram, PRECISION, initial)
    return matmul((matmul(directions, tl.trans(k), PRECISION) * weights).to(DTYPE), k, PRECISION, initial)


@triton.constexpr_function
def truncation_compensation(dtype):
    """Return the factor that compensates `truncate` on average.

    Truncation to bfloat16 reduces numbers with uniformly distributed digits by 2^-8 / (2 ln 2) on average.
    """
    return 1.00283 if dtype == tl.bfloat16 else 1.0


@triton.jit
def truncate(x, dtype):
    """Clear the bits of `x` that `dtype` does not store. Unlike rounding, this needs no register conversion."""
    if dtype == tl.bfloat16:
        x = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return x


@triton.jit
def chebyshev(rhs, gram, k, weights, entry_decay, shift, rho, iterations, PRECISION: tl.constexpr):
    """Compute Chebyshev iterations for S / (m entry_decay), given its `weights` and `shift`.

    r is the residual times -1 / entry_decay. A direction that is computed just before its product stays in registers.
    """
    DTYPE: tl.constexpr = gram.dtype
    x, r = tl.zeros(rhs.shape, tl.float32), rhs * (-1.0 / entry_decay)[:, None]
    if gram.shape[0] > 128:  # 8 warps, two per token: directions pass through shared memory
        weight, d = 2.0 + 0.0 * rho, rhs.to(DTYPE)
        for _ in range(iterations):
            direction = d.to(tl.float32)
            x += direction
            r = apply_systems(d, gram, k, weights, r + shift[:, None] * direction, PRECISION)
            weight = 4.0 / (4.0 - rho * rho * weight)
            d = ((weight - 1.0) * direction - (weight * entry_decay[:, None]) * r).to(DTYPE)
        return x + d.to(tl.float32)
    weight, d = 1.0 + 0.0 * rho, tl.zeros(rhs.shape, DTYPE)
    for i in range(iterations):
        scale = truncation_compensation(DTYPE) * weight
        direction = truncate(
            (scale - truncation_compensation(DTYPE)) * d.to(tl.float32) - (scale * entry_decay[:, None]) * r, DTYPE
        )
        x += direction
        d = direction.to(DTYPE)
        r = apply_systems(d, gram, k, weights, r + shift[:, None] * direction, PRECISION)
        weight = 4.0 / (4.0 - rho * rho * tl.where(i == 0, 2.0, weight))
    return x + ((weight - 1.0) * d.to(tl.float32) - (weight * entry_decay[:, None]) * r)


@triton.constexpr_function
def min_relative_ridge(dtype):
    """Return the smallest ridge, relative to ||H||_F, that exceeds the rounding of H stored in `dtype`."""
    return 2.0**-10 if dtype == tl.bfloat16 else 2.0**-23


@triton.jit
def conjugate_gradient(rhs, gram, k, weights, entry_decay, shift, iterations, PRECISION: tl.constexpr):
    """Compute conjugate-gradient iterations for S / (m entry_decay), given its `weights` and `shift`.

    A token stops when its residual is rounding error or its curvature is not positive; later steps would only add
    noise.
    """
    DTYPE: tl.constexpr = gram.dtype
    x, d, r, square = tl.zeros(rhs.shape, tl.float32), tl.zeros(rhs.shape, DTYPE), rhs, tl.sum(rhs * rhs, 1)
    ratio, threshold = 0.0 * square, 1e-16 * square
    for _ in range(iterations):
        direction = truncate(r + ratio[:, None] * d.to(tl.float32), DTYPE)
        d = direction.to(DTYPE)
        image = apply_systems(d, gram, k, weights, shift[:, None] * direction, PRECISION)
        curvature = entry_decay * tl.sum(direction * image, 1)
        step = tl.where(curvature > 0, square / tl.where(curvature > 0, curvature, 1.0), 0.0)
        x += step[:, None] * direction
        r -= (step * entry_decay)[:, None] * image
        square_next = tl.sum(r * r, 1)
        square_next = tl.where((square_next > threshold) & (step > 0), square_next, 0.0)
        ratio = tl.where(square > 0, square_next / tl.where(square > 0, square, 1.0), 0.0)
        square = square_next
    return x


@triton.jit
def solve(
    rhs, gram, k, weights, entry_decay, norm, ridge_parameter, iterations,
    ADAPTIVE: tl.constexpr, CONJUGATE_GRADIENT: tl.constexpr, MIN_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return S^{-1} rhs of a tile's tokens, and `weights`, so that they stay in registers.

    Systems are divided by m (see `linear_solvers.spectrum_scale`) and by the decay of H_0, so that products with H_0
    need no scaling. The decay is bounded below by `MIN_ENTRY_DECAY`, where all of H_0 is far below `MIN_NORM`. A ratio
    that is the same for all tokens is a scalar. Right sides are scaled to a largest entry of 1: after a strong decay,
    `weights` are so large that products of two directions could overflow.
    """
    DTYPE: tl.constexpr = gram.dtype
    nonzero = norm >= 0.0
    entry_share = tl.maximum(entry_decay, MIN_ENTRY_DECAY)
    if ADAPTIVE:
        nonzero = norm > MIN_NORM
        factor = tl.maximum(ridge_parameter, min_relative_ridge(DTYPE))
        middle = factor + 0.5
        inverse = 1.0 / (middle * tl.where(nonzero, norm, 1.0))
        ridge, rho = factor * tl.where(nonzero, norm, 1.0), 0.5 / middle
    else:
        ridge = tl.maximum(ridge_parameter, min_relative_ridge(DTYPE) * norm)
        inverse = 1.0 / (ridge + 0.5 * norm)
        rho = (0.5 * norm * inverse)[:, None]
    inverse = tl.where(norm < float("inf"), inverse, float("nan"))  # the squared norm overflowed
    largest = tl.max(tl.abs(rhs), 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    rhs = rhs / largest[:, None]
    weights *= (1.0 / entry_share)[:, None]
    shift, entry_decay = ridge / entry_share, entry_share * inverse
    if CONJUGATE_GRADIENT:
        x = conjugate_gradient(rhs, gram, k, weights, entry_decay, shift, iterations, PRECISION)
    else:
        x = chebyshev(rhs, gram, k, weights, entry_decay, shift, rho, iterations, PRECISION)
    return x * tl.where(nonzero, inverse * largest, 0.0)[:, None], weights * entry_share[:, None]
