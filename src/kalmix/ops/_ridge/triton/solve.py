"""Solving all tokens of a tile at once, in Triton: iterations that keep x, a direction d and the residual r.

Directions are cut to the inputs' dtype, as tensor cores take them, and r is what they leave of it: the errors of
steps that come later are as small as they are, and only the rounding of H at the tile's entry stays.

With A(t, s) the decay from token s to token t, rows d_t go to rows S_t d_t:

    S d = A(t, entry) d H_0 + ((d k') A(t, s) g_s)_{s <= t} k + ridge_t d
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import (
    UNSPECIALIZED,
    Tiling,
    dot_precision,
    load_per_token,
    locate_program,
    locate_tile,
    matmul,
    tile_sequences,
)
from kalmix.segments import segments_without_checks

MIN_ENTRY_DECAY = tl.constexpr(1e-26)  # a share of H_0 that is as good as none
MIN_LOG_DECAY = tl.constexpr(-1e4)  # a log-decay that leaves nothing


class LaunchPlan(NamedTuple):
    """How a call is cut and its kernels launched.

    Attributes:
        cut: the tiles.
        heads: value heads.
        grid: a program a tile and head.
        tiles: what a kernel needs to find its tile.
        share: value heads a key head.
        strips: how many programs carry H, and how many H and U, from tile to tile.
        compiled: what all kernels compile for.
        solved: how kernels are launched that solve.
        carried: how those are that carry from tile to tile, some columns a program.
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
    """By rule, from widths and dtypes; `segments` are the rows of `Segments`."""
    (batch, length, key_heads, width), (heads, values) = k.shape, v.shape[2:]
    cut = tile_sequences(batch, length, size, None if segments is None else segments_without_checks(segments), k)
    padded = max(16, triton.next_power_of_2(width))
    columns = min(padded, 64 if padded <= 128 else 32)
    while columns > 32 and cut.num_sequences * heads * (padded // columns) < 128:
        columns //= 2
    column_blocks = triton.cdiv(width, columns)
    constants = {"K": width, "V": values, "P": padded, "SIZE": size, "PACKED": segments is not None}
    solve_options = {"num_warps": 4 if padded <= 128 else 8, "num_stages": 1}
    pipelined = k.dtype == torch.bfloat16 and width % 4 == 0  # as in `primitives.triton_filter.carried`
    scan_options = {"COLUMNS": columns, "STAGES": 2 if pipelined else 1, "num_warps": 4}
    return LaunchPlan(
        cut=cut,
        heads=heads,
        grid=(cut.num_tiles * heads,),
        tiles=(cut.tile_table, length, cut.tiles),
        group_size=heads // key_heads,
        column_blocks=(column_blocks, column_blocks + triton.cdiv(values, columns)),
        constants=constants | {"PRECISION": dot_precision(k.dtype)},
        solve_options=solve_options,
        scan_options=scan_options,
    )


def value_block(plan: LaunchPlan) -> int:
    """Columns of values worked on at a time: 64 also of narrow ones, as `triton_filter.BLOCK` says why."""
    return 64 if plan.constants["V"] <= 64 or plan.constants["P"] > 128 else 128


@triton.constexpr_function
def divides(width, block):
    """Whether blocks fill a width."""
    return width % block == 0


@triton.jit
def load_block(base, row, column, K: tl.constexpr, V: tl.constexpr):
    """A block of a contiguous `[K, V]`, 0 beyond."""
    token_start = base + row[:, None] * V + column[None, :]
    if divides(K, row.shape[0]) and divides(V, column.shape[0]):
        block = tl.load(token_start)
    else:
        block = tl.load(token_start, mask=(row < K)[:, None] & (column < V)[None, :], other=0.0)
    return block


@triton.jit
def load_state(base, row, column, stride, step, K: tl.constexpr, V: tl.constexpr):
    """A block of a `[K, V]` of any strides, 0 beyond."""
    in_bounds = (row < K)[:, None] & (column < V)[None, :]
    return tl.load(base + row[:, None] * stride + column[None, :] * step, mask=in_bounds, other=0.0)


@triton.jit
def store_block(base, row, column, x, K: tl.constexpr, V: tl.constexpr):
    token_start, x = base + row[:, None] * V + column[None, :], x.to(base.dtype.element_ty)
    if divides(K, row.shape[0]) and divides(V, column.shape[0]):
        tl.store(token_start, x)
    else:
        tl.store(token_start, x, mask=(row < K)[:, None] & (column < V)[None, :])


@triton.jit
def load_token_scalars(base, slot, SIZE: tl.constexpr):
    """One number a token of a tile, `[SIZE]`, from where they lie side by side."""
    return tl.load(base + slot * SIZE + tl.arange(0, SIZE))


@triton.jit
def store_token_scalars(base, slot, x):
    SIZE: tl.constexpr = x.shape[0]
    tl.store(base + slot * SIZE + tl.arange(0, SIZE), x)


@triton.jit
def program_tile(tile_table, length, tiles, G, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """A program's head, and of its tile the first token, how many, its row `[B * T * G]`, its slot `[tiles * G]`."""
    index, head, _part = locate_program(G, 1)
    token, count = locate_tile(tile_table, index, length, tiles, SIZE, PACKED)
    return head, token, count, token * G + head, index.to(tl.int64) * G + head


@triton.jit(do_not_specialize=UNSPECIALIZED)
def compute_decays(
    log_decay, gain, log_decays, log_decay_remainders, entry_decays, exit_weights, weights, tile_decays, tile_table,
    length, tiles, G, SIZE: tl.constexpr, PACKED: tl.constexpr, DECAY: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Log-decay from a tile's entry to each token, in two parts; A(t, entry); g_t A(exit, t); g_t; A(exit, entry)."""
    _head, _token, count, row, slot = program_tile(tile_table, length, tiles, G, SIZE, PACKED)
    exit_weight = tl.full([SIZE], 1.0, tl.float32)
    if DECAY:
        token_log_decay = load_per_token(log_decay + row, count, G, SIZE)
        token_log_decay = tl.maximum(token_log_decay, MIN_LOG_DECAY).to(
            tl.float64
        )  # or sums would have no digits left for what decays a little
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
    """What decays and gains of a call come to, a number a token and tile: `[tiles, heads, SIZE]`; see `pace`."""

    log_decays: Tensor
    log_decay_remainders: Tensor
    entry_decays: Tensor
    exit_weights: Tensor
    weights: Tensor
    tile_decays: Tensor  # [tiles, heads]


def decay_tables(plan: LaunchPlan, log_decay: Tensor | None, gain: Tensor | None, placeholder: Tensor) -> DecayTables:
    """The pace of a call; placeholders where it has neither decays nor gains."""
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
    """Log-decay from token s to token t, `[t, s]`, above 0 where t < s: a difference as in float64."""
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
    """Of a tile: A(t, s) `[t, s]`, 0 where t < s; gains; A(t, entry)."""
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
    """a_t'b_t of every token. From registers that hold other rows, tensor cores are the shorter way."""
    if b.dtype == tl.float32:
        return tl.sum(a * b, 1)
    return diagonal(matmul(a.to(b.dtype), tl.trans(b), PRECISION))


@triton.jit
def diagonal(x):
    """Of a square."""
    t = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(t[:, None] == t[None, :], x, 0.0), 1)


@triton.jit
def apply_systems(directions, gram, k, weights, initial, PRECISION: tl.constexpr):
    """`onto` + d H_0 + ((d k') weights) k, rows d in the dtype of `gram`."""
    DTYPE: tl.constexpr = gram.dtype
    initial = matmul(directions, gram, PRECISION, initial)
    return matmul((matmul(directions, tl.trans(k), PRECISION) * weights).to(DTYPE), k, PRECISION, initial)


@triton.constexpr_function
def truncation_compensation(dtype):
    """What makes up for `shortened`, on average: of digits evenly spread it takes 2^-8 / (2 ln 2), and 0 of float32."""
    return 1.00283 if dtype == tl.bfloat16 else 1.0


@triton.jit
def truncate(x, dtype):
    """`x` without the digits that a dtype does not keep: cut, not rounded, it keeps its half of a register."""
    if dtype == tl.bfloat16:
        x = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return x


@triton.jit
def chebyshev(rhs, gram, k, weights, entry_decay, shift, rho, iterations, PRECISION: tl.constexpr):
    """So many iterations; `weights` and `shift` are those of S / (m fade), and r is -1 / fade of what is left.

    A direction that is made where it is multiplied stays in registers.
    """
    DTYPE: tl.constexpr = gram.dtype
    x, r = tl.zeros(rhs.shape, tl.float32), rhs * (-1.0 / entry_decay)[:, None]
    if gram.shape[0] > 128:  # 8 warps, of which two share a token: directions go by shared memory
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
    """Return the least ridge, relative to ||H||_F, that outweighs the rounding of H, which is kept in this dtype."""
    return 2.0**-10 if dtype == tl.bfloat16 else 2.0**-23


@triton.jit
def conjugate_gradient(rhs, gram, k, weights, entry_decay, shift, iterations, PRECISION: tl.constexpr):
    """So many conjugate gradients; `weights` and `shift` are those of S / (m fade).

    A token stays where it is once its residual is rounding, or its curvature not positive: what follows is noise.
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
    """S^{-1} rhs of a tile's tokens, from H at its entry, keys, paths and norms; and the weights, left in registers.

    All is divided by m, as `systems.scale_of` has it, and by the share of H_0 that is left, so that products with H_0
    need no scaling; by no less than `FAINT`, where all of H_0 is far below `MIN_NORM`. A ratio that is the same for all
    tokens is a number, not a row.
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
    inverse = tl.where(norm < float("inf"), inverse, float("nan"))  # its square overflowed
    weights *= (1.0 / entry_share)[:, None]
    shift, entry_decay = ridge / entry_share, entry_share * inverse
    if CONJUGATE_GRADIENT:
        x = conjugate_gradient(rhs, gram, k, weights, entry_decay, shift, iterations, PRECISION)
    else:
        x = chebyshev(rhs, gram, k, weights, entry_decay, shift, rho, iterations, PRECISION)
    return x * tl.where(nonzero, inverse, 0.0)[:, None], weights * entry_share[:, None]
