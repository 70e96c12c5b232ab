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

from kalmix.kernels.primitives.triton_decays import between, elapsed
from kalmix.kernels.primitives.triton_tiles import Cut, cut_tokens, load_per_token, precision, product
from kalmix.segments import Segments

FAINT = tl.constexpr(1e-26)  # of H at the entry


class Shape(NamedTuple):
    """How a call is cut and its kernels launched.

    Attributes:
        cut: the tiles.
        grid: tiles by heads.
        tiles: what a kernel needs to find its tile.
        share: value heads a key head.
        strips: how many programs carry H, and how many H and U, from tile to tile.
        compiled: what all kernels compile for.
        solved: how kernels are launched that solve.
        pulled: how those are that take gradients through what tokens wrote.
        carried: how those are that carry from tile to tile, some columns a program.
    """

    cut: Cut
    grid: tuple[int, int]
    tiles: tuple[Any, ...]
    share: int
    strips: tuple[int, int]
    compiled: dict[str, Any]
    solved: dict[str, int]
    pulled: dict[str, int]
    carried: dict[str, int]


def shape_of(k: Tensor, v: Tensor, segments: Tensor | None, size: int) -> Shape:
    """By rule, from widths and dtypes; `segments` are the rows of `Segments`."""
    (batch, length, shared, width), (heads, values) = k.shape, v.shape[2:]
    cut = cut_tokens(batch, length, size, None if segments is None else Segments(segments), k)
    lanes = max(16, triton.next_power_of_2(width))
    strip = min(lanes, 64 if lanes <= 128 else 32)
    while strip > 32 and cut.sequences * heads * (lanes // strip) < 128:
        strip //= 2
    strips = triton.cdiv(width, strip)
    compiled = {"K": width, "V": values, "P": lanes, "SIZE": size, "PACKED": segments is not None}
    solved = {"num_warps": 4 if lanes <= 128 else 8, "num_stages": 1}
    carried = {"VALUES": strip, "STRIPS": strips, "STAGES": 2 if k.dtype == torch.bfloat16 else 1, "num_warps": 4}
    return Shape(
        cut=cut,
        grid=(cut.count, heads),
        tiles=(cut.table, length, cut.tiles),
        share=heads // shared,
        strips=(strips, strips + triton.cdiv(values, strip)),
        compiled=compiled | {"PRECISION": precision(k.dtype)},
        solved=solved,
        pulled=solved | {"num_warps": 4},
        carried=carried,
    )


def block_of(s: Shape) -> int:
    """Columns of values worked on at a time: 64 also of narrow ones, as `triton_filter.BLOCK` says why."""
    return 64 if s.compiled["V"] <= 64 or s.compiled["P"] > 128 else 128


@triton.constexpr_function
def whole(width, block):
    """Whether blocks fill a width."""
    return width % block == 0


@triton.jit
def load_block(base, row, column, K: tl.constexpr, V: tl.constexpr):
    """A block of a contiguous `[K, V]`, 0 beyond."""
    at = base + row[:, None] * V + column[None, :]
    if whole(K, row.shape[0]) and whole(V, column.shape[0]):
        block = tl.load(at)
    else:
        block = tl.load(at, mask=(row < K)[:, None] & (column < V)[None, :], other=0.0)
    return block


@triton.jit
def store_block(base, row, column, x, K: tl.constexpr, V: tl.constexpr):
    at, x = base + row[:, None] * V + column[None, :], x.to(base.dtype.element_ty)
    if whole(K, row.shape[0]) and whole(V, column.shape[0]):
        tl.store(at, x)
    else:
        tl.store(at, x, mask=(row < K)[:, None] & (column < V)[None, :])


@triton.jit
def paths(
    log_decay, gain, token, count, head, G, SIZE: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """Of a tile: A(t, s) `[t, s]`, 0 where t < s; gains; A(t, entry)."""
    t = tl.arange(0, SIZE)
    one = tl.full([SIZE], 1.0, tl.float32)
    decays, weight, fade = tl.where(t[:, None] >= t[None, :], 1.0, 0.0), one, one
    if DECAYS:
        since, _total = elapsed(log_decay, token, count, head, G, SIZE)
        decays, fade = between(since, SIZE), tl.exp(since.to(tl.float32))
    if GAINS:
        weight = load_per_token(gain + token * G + head, count, G, SIZE)
    return decays, weight, fade


@triton.jit
def images(d, gram, k, weights, onto, PRECISION: tl.constexpr):
    """`onto` + d H_0 + ((d k') weights) k, rows d in the dtype of `gram`."""
    KIND: tl.constexpr = gram.dtype
    pairs = (product(d, tl.trans(k), PRECISION) * weights).to(KIND)
    return product(pairs, k, PRECISION, product(d, gram, PRECISION, onto))


@triton.jit
def shortened(x, kind):
    """`x` without the digits that a dtype does not keep: cut, not rounded, it keeps its half of a register."""
    if kind == tl.bfloat16:
        x = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return x


@triton.jit
def chebyshev(rhs, gram, k, weights, fade, shift, rho, iterations, PRECISION: tl.constexpr):
    """So many iterations; `weights` and `shift` are those of S / (m fade), `fade` takes it back to S / m."""
    KIND: tl.constexpr = gram.dtype
    weight = 1.0 + 0.0 * rho
    x, d, r = tl.zeros(rhs.shape, tl.float32), tl.zeros(rhs.shape, KIND), rhs * (-1.0 / fade)[:, None]
    for i in range(iterations):
        wide = shortened((weight - 1.0) * d.to(tl.float32) - (weight * fade[:, None]) * r, KIND)
        x += wide
        d = wide.to(KIND)
        r = images(d, gram, k, weights, r + shift[:, None] * wide, PRECISION)
        weight = 4.0 / (4.0 - rho * rho * tl.where(i == 0, 2.0, weight))
    return x + ((weight - 1.0) * d.to(tl.float32) - (weight * fade[:, None]) * r)


@triton.jit
def conjugate(rhs, gram, k, weights, fade, shift, iterations, PRECISION: tl.constexpr):
    """So many conjugate gradients; the same `weights`, `shift` and `fade`."""
    KIND: tl.constexpr = gram.dtype
    x, d, r, square = tl.zeros(rhs.shape, tl.float32), tl.zeros(rhs.shape, KIND), rhs, tl.sum(rhs * rhs, 1)
    ratio = 0.0 * square
    for _ in range(iterations):
        wide = shortened(r + ratio[:, None] * d.to(tl.float32), KIND)
        d = wide.to(KIND)
        image = images(d, gram, k, weights, shift[:, None] * wide, PRECISION)
        curve = fade * tl.sum(wide * image, 1)
        step = tl.where(curve > 0, square / tl.where(curve > 0, curve, 1.0), 0.0)
        x += step[:, None] * wide
        r -= (step * fade)[:, None] * image
        left = tl.sum(r * r, 1)
        ratio = tl.where(square > 0, left / tl.where(square > 0, square, 1.0), 0.0)
        square = left
    return x


@triton.jit
def solve(
    rhs, gram, k, weights, fade, norm, level, iterations,
    ADAPTIVE: tl.constexpr, CONJUGATE: tl.constexpr, NOTHING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S^{-1} rhs of a tile's tokens, from H at its entry, keys, paths and norms; and the weights, left in registers.

    All is divided by m, as `systems.scale_of` has it, and by how much of H_0 is left, so that H_0 need not be scaled:
    at least by `FAINT`, which makes of H_0 far less than `NOTHING`. A ratio that is the same for all tokens is a
    number, not a row.
    """
    something = norm >= 0.0
    left = tl.maximum(fade, FAINT)
    if ADAPTIVE:
        something = norm > NOTHING
        middle = level + 0.5
        inverse = 1.0 / (middle * tl.where(something, norm, 1.0))
        ridge, rho = level * tl.where(something, norm, 1.0), 0.5 / middle
    else:
        inverse = 1.0 / (level + 0.5 * norm)
        ridge, rho = level + 0.0 * norm, (0.5 * norm * inverse)[:, None]
    weights *= (1.0 / left)[:, None]
    shift, fade = ridge / left, left * inverse
    if CONJUGATE:
        x = conjugate(rhs, gram, k, weights, fade, shift, iterations, PRECISION)
    else:
        x = chebyshev(rhs, gram, k, weights, fade, shift, rho, iterations, PRECISION)
    return x * tl.where(something, inverse, 0.0)[:, None], weights * left[:, None]
