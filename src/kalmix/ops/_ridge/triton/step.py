"""Triton kernel of the step of `ridge`: one token for each row, in place on a pool of sums.

A program updates both sums of one row and value head, solves its system in registers, and reads. Up to 128 keys the
gram is in registers, too. Wider ones are read again in each iteration, in blocks of columns. Sizes depend on widths
only: a row has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.beliefs import RidgeBelief
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import MIN_NORM, Adaptive, Chebyshev, ConjugateGradient, Ridge
from kalmix.ops._shared.step import Slots
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx
from kalmix.ops._shared.triton.step import contiguous_width, matrix_sizes, row_strides, take_block

REGISTERS = 128  # registers of a thread at 128 keys: two programs at once on a multiprocessor


@triton.jit
def place_gram(block, KEYS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, STRIP: tl.constexpr):
    """Return the columns of a block of a gram, and its offsets and mask in strips `[KEYS, strips, STRIP]`."""
    rows = tl.arange(0, KEYS)[:, None, None]
    strips = tl.arange(0, COLUMNS // STRIP)[:, None]
    columns = block * COLUMNS + strips * STRIP + tl.arange(0, STRIP)[None, :]
    return columns, rows * K + columns[None, :, :], (rows < K) & (columns[None, :, :] < K)


@triton.jit
def load_gram(at, k, key, decay, weight, block, active, K: tl.constexpr, COLUMNS: tl.constexpr, STRIP: tl.constexpr):
    """Load a block of columns of a gram, in strips, and apply the decay and the present token."""
    columns, cells, inside = place_gram(block, key.shape[0], K, COLUMNS, STRIP)
    tile = tl.load(at + cells, mask=inside & active, other=0.0)
    column_key = tl.load(k + columns, mask=(columns < K) & active, other=0.0).to(tile.dtype)
    return decay * tile + (weight * key)[:, None, None] * column_key[None, :, :]


@triton.jit
def sum_columns(tile):
    """Return the sums of the rows of a tile in strips; a thread adds all strips before threads exchange sums."""
    return tl.sum(tl.sum(tile, 1), 1)


@triton.jit
def multiply(tile, at, k, key, decay, weight, active, x, K: tl.constexpr, COLUMNS: tl.constexpr, STRIP: tl.constexpr):
    """Return H x, with H in `tile` or read in blocks of columns."""
    BLOCKS: tl.constexpr = key.shape[0] // COLUMNS
    if BLOCKS == 1:
        product = sum_columns(tile * tl.reshape(x, [COLUMNS // STRIP, STRIP])[None, :, :])
    else:
        product = tl.zeros(x.shape, x.dtype)
        for block in range(BLOCKS):
            columns = load_gram(at, k, key, decay, weight, block, active, K, COLUMNS, STRIP)
            part = tl.reshape(take_block(x, block, COLUMNS), [COLUMNS // STRIP, STRIP])
            product += sum_columns(columns * part[None, :, :])
    return product


@triton.jit
def solve_chebyshev(
    tile, at, k, key, decay, weight, active, rhs, inverse, shift, rho,
    ITERATIONS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Compute Chebyshev iterations for S / m, whose spectrum is in [1 - rho, 1 + rho]."""
    before, x, factor = tl.zeros(rhs.shape, rhs.dtype), rhs, 2.0 + 0.0 * rho
    for _ in range(ITERATIONS):
        factor = 4.0 / (4.0 - rho * rho * factor)
        image = inverse * multiply(tile, at, k, key, decay, weight, active, x, K, COLUMNS, STRIP) + shift * x
        following = x - factor * (image - rhs) + (factor - 1.0) * (x - before)
        before = x
        x = following
    return x


@triton.jit
def solve_conjugate_gradient(
    tile, at, k, key, decay, weight, active, rhs, inverse, shift,
    ITERATIONS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, STRIP: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Compute conjugate-gradient iterations for S / m; return the iterate with the smallest residual."""
    x, best, direction, residual = (
        tl.zeros(rhs.shape, rhs.dtype), tl.zeros(rhs.shape, rhs.dtype), tl.zeros(rhs.shape, rhs.dtype), rhs,
    )  # fmt: skip
    square = tl.sum(rhs * rhs, 0)
    smallest, threshold, ratio = square + 0.0, (0.1 * EPS) * (0.1 * EPS) * square, 0.0 * square
    for _ in range(ITERATIONS):
        direction = residual + ratio * direction
        image = (
            inverse * multiply(tile, at, k, key, decay, weight, active, direction, K, COLUMNS, STRIP)
            + shift * direction
        )
        curvature = tl.sum(direction * image, 0)
        length = tl.where(curvature > 0.0, square / tl.where(curvature > 0.0, curvature, 1.0), 0.0)
        x += length * direction
        residual -= length * image
        following = tl.sum(residual * residual, 0)
        best = tl.where(following < smallest, x, best)
        smallest = tl.minimum(following, smallest)
        following = tl.where((following > threshold) & (length > 0.0), following, 0.0)
        ratio = tl.where(square > 0.0, following / tl.where(square > 0.0, square, 1.0), 0.0)
        square = following
    return best


@triton.jit
def step_sums(
    q, k, v, log_decay, gain, mix, crosses, grams, read, write, mean, variance,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, gain_row, gain_head, mix_row, mix_head,
    cross_slot, gram_slot, heads, group,
    K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, STRIP: tl.constexpr,
    VALUES: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr, MIXES: tl.constexpr, VARIANCE: tl.constexpr,
    ADAPTIVE: tl.constexpr, RIDGE: tl.constexpr, CHEBYSHEV: tl.constexpr, ITERATIONS: tl.constexpr,
    EPS: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Update the sums of a row and head, solve for its query, and read."""
    dtype = grams.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active, stored = source >= 0, (source >= 0) & (target >= 0)
    keys = tl.arange(0, KEYS)
    has_key = (keys < K) & active
    k += row * k_row + (head // group) * k_head
    query = tl.load(q + row * q_row + (head // group) * q_head + keys, mask=has_key, other=0.0).to(dtype)
    key = tl.load(k + keys, mask=has_key, other=0.0).to(dtype)
    decay, weight, share = tl.full([], 1.0, dtype), tl.full([], 1.0, dtype), tl.full([], 1.0, dtype)
    if DECAYS:
        decay = tl.exp(tl.load(log_decay + row * decay_row + head * decay_head).to(dtype))
    if GAINS:
        weight = tl.load(gain + row * gain_row + head * gain_head).to(dtype)
    if MIXES:
        share = tl.load(mix + row * mix_row + head * mix_head).to(dtype)

    BLOCKS: tl.constexpr = KEYS // COLUMNS
    at = grams + source * gram_slot + head * K * K
    to = grams + target * gram_slot + head * K * K
    tile = load_gram(at, k, key, decay, weight, 0, active, K, COLUMNS, STRIP)
    if BLOCKS == 1:  # stored early, so that the stores overlap with the iterations
        _, in_strips, in_gram = place_gram(0, KEYS, K, COLUMNS, STRIP)
        tl.debug_barrier()  # every warp has read the old gram
        tl.store(to + in_strips, tile, mask=in_gram & stored)
    squares = sum_columns(tile * tile)
    for block in range(1, BLOCKS):
        other = load_gram(at, k, key, decay, weight, block, active, K, COLUMNS, STRIP)
        squares += sum_columns(other * other)
    square = tl.sum(squares, 0)
    nonzero = square > SMALLEST * SMALLEST
    norm = tl.where(nonzero, tl.sqrt(tl.where(nonzero, square, 1.0)), 0.0)
    parameter = tl.full([], RIDGE, dtype)
    if ADAPTIVE:
        factor = tl.maximum(parameter, EPS)
        middle = factor + 0.5
        inverse = tl.where(nonzero, 1.0 / tl.where(nonzero, middle * norm, 1.0), 0.0)
        shift, rho = factor / middle, 0.5 / middle
    else:
        strength = tl.maximum(parameter, EPS * norm)
        inverse = 1.0 / (strength + 0.5 * norm)
        shift, rho = strength * inverse, 0.5 * norm * inverse
    inverse = tl.where(norm < float("inf"), inverse, float("nan"))
    if CHEBYSHEV:
        x = solve_chebyshev(
            tile, at, k, key, decay, weight, active, query, inverse, shift, rho, ITERATIONS, K, COLUMNS, STRIP
        )
    else:
        x = solve_conjugate_gradient(
            tile, at, k, key, decay, weight, active, query, inverse, shift, ITERATIONS, K, COLUMNS, STRIP, EPS
        )
    x = tl.where(has_key, x * inverse, 0.0)
    if VARIANCE:
        spread = tl.where(active, tl.sum(query * x, 0), 0.0)
        tl.store(variance + row * heads + head, spread.to(variance.dtype.element_ty))
    reader = query + share * (x - query)

    if BLOCKS > 1:
        tl.debug_barrier()  # every warp has read the old gram
        for block in range(BLOCKS):
            new = load_gram(at, k, key, decay, weight, block, active, K, COLUMNS, STRIP)
            _, in_strips, in_gram = place_gram(block, KEYS, K, COLUMNS, STRIP)
            tl.store(to + in_strips, new, mask=in_gram & stored)
    for first in range(0, V, VALUES):
        columns = first + tl.arange(0, VALUES)
        has_column = (columns < V) & active
        cells = (head * K + keys)[:, None] * V + columns[None, :]
        inside = has_key[:, None] & has_column[None, :]
        value = tl.load(v + row * v_row + head * v_head + columns, mask=has_column, other=0.0).to(dtype)
        cross = decay * tl.load(crosses + source * cross_slot + cells, mask=inside, other=0.0)
        cross += (weight * key)[:, None] * value[None, :]
        total = tl.where(has_column, tl.sum(reader[:, None] * cross, 0), 0.0)
        tl.store(mean + (row * heads + head) * V + columns, total.to(mean.dtype.element_ty), mask=columns < V)
        tl.store(crosses + target * cross_slot + cells, cross, mask=inside & stored)


def step(
    signals: RidgeSignals,
    pool: RidgeBelief,
    slots: Slots,
    out: tuple[Tensor, Tensor | None] | None,
    variance: bool,
    ridge: Ridge,
    solver: Chebyshev | ConjugateGradient,
) -> tuple[Tensor, Tensor | None]:
    """Launch the step; return the mean `[B, 1, G, V]`, and the variance `[B, 1, G, 1]` if requested."""
    q, k, v = (contiguous_width(x) for x in signals[:3])
    factors = signals[3:]
    (batch, _, heads, width), keys = v.shape, k.shape[3]
    mean, read_variance = (None, None) if out is None else out
    mean = torch.empty(v.shape, dtype=v.dtype, device=v.device) if mean is None else mean
    if variance and read_variance is None:
        read_variance = torch.empty(batch, 1, heads, 1, dtype=pool.gram.dtype, device=v.device)
    adaptive, sizes = isinstance(ridge, Adaptive), matrix_sizes(keys, width)
    if sizes["KEYS"] == 128 and pool.gram.dtype == torch.float32 and supports_ptx():
        sizes["maxnreg"] = REGISTERS
    Launch(step_sums, (batch, heads), (
        q, k, v, *(v if x is None else x for x in factors), *pool, *slots,
        mean, mean if read_variance is None else read_variance,
        *(y for x in (q, k, v, *factors) for y in row_strides(x)), *(x.stride(0) for x in pool),
        heads, heads // q.shape[2],
    ), {
        "K": keys, "V": width, "VARIANCE": variance, "ADAPTIVE": adaptive,
        **dict(zip(("DECAYS", "GAINS", "MIXES"), (x is not None for x in factors), strict=True)),
        "RIDGE": float(ridge.factor if isinstance(ridge, Adaptive) else ridge.value),
        "CHEBYSHEV": isinstance(solver, Chebyshev), "ITERATIONS": solver.iterations,
        "EPS": torch.finfo(pool.gram.dtype).eps, "SMALLEST": MIN_NORM, **sizes,
    }).run()  # fmt: skip
    return mean, read_variance if variance else None
