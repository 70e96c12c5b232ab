"""Solving all tokens of a tile at once, in Triton: iterations that keep x, a direction d and the residual r.

Directions are rounded to the inputs' dtype, as tensor cores take them, and r is what they leave of it. What H_0, so
rounded, makes of r is put right once, from S x in full: the errors of steps that come later are as small as they are.
Chebyshev iteration goes on from there; conjugate gradients, which by then may have nothing left to go by, start again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.primitives.triton_decays import between, elapsed
from kalmix.kernels.primitives.triton_filter import strides
from kalmix.kernels.primitives.triton_tiles import (
    LOOSE,
    Cut,
    cut_tokens,
    load_per_token,
    load_rows,
    precision,
    product,
    store_rows,
    tile_of,
)
from kalmix.kernels.ridge.tiles import in_two_parts
from kalmix.segments import Segments
from kalmix.solvers import NOTHING

REFRESH = 10


class Shape(NamedTuple):
    """How a call is cut and its kernels launched.

    Attributes:
        cut: the tiles.
        grid: tiles by heads.
        tiles: what a kernel needs to find its tile.
        share: value heads a key head.
        lanes: key width, padded.
        strip: columns of H that a program carries from tile to tile.
        splits: whether H is kept in two parts.
        compiled: what all kernels compile for.
    """

    cut: Cut
    grid: tuple[int, int]
    tiles: tuple[Any, ...]
    share: int
    lanes: int
    strip: int
    splits: bool
    compiled: dict[str, Any]


def shape_of(k: Tensor, heads: int, segments: Tensor | None, size: int) -> Shape:
    """By rule, from widths and dtypes; `segments` are the rows of `Segments`."""
    batch, length, shared, width = k.shape
    cut = cut_tokens(batch, length, size, None if segments is None else Segments(segments), k)
    lanes = max(16, triton.next_power_of_2(width))
    strip = min(lanes, 64 if lanes <= 128 else 32)
    while strip > 32 and cut.sequences * heads * (lanes // strip) < 128:
        strip //= 2
    compiled = {"K": width, "P": lanes, "SIZE": size, "PACKED": segments is not None, "PRECISION": precision(k.dtype)}
    compiled |= {"num_warps": 4 if lanes <= 128 else 8, "num_stages": 1}
    tiles = (cut.table, length, cut.tiles)
    return Shape(cut, (cut.count, heads), tiles, heads // shared, lanes, strip, in_two_parts(width, k.dtype), compiled)


@triton.jit
def load_square(base, row, column, K: tl.constexpr, P: tl.constexpr):
    """A block of a contiguous `[K, K]`, 0 beyond."""
    if K == P:
        block = tl.load(base + row[:, None] * K + column[None, :])
    else:
        inside = (row < K)[:, None] & (column < K)[None, :]
        block = tl.load(base + row[:, None] * K + column[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def store_square(base, row, column, x, K: tl.constexpr, P: tl.constexpr):
    x = x.to(base.dtype.element_ty)
    if K == P:
        tl.store(base + row[:, None] * K + column[None, :], x)
    else:
        tl.store(base + row[:, None] * K + column[None, :], x, mask=(row < K)[:, None] & (column < K)[None, :])


@triton.jit
def scales(norm, level, ADAPTIVE: tl.constexpr, NOTHING: tl.constexpr):
    """1 / m, ridge / m and rho of tokens, as `systems.scale_of`."""
    if ADAPTIVE:
        middle = level + 0.5
        something = norm > NOTHING
        inverse = tl.where(something, 1.0 / (middle * tl.where(something, norm, 1.0)), 0.0)
        shift, rho = norm * 0.0 + level / middle, norm * 0.0 + 0.5 / middle
    else:
        inverse = 1.0 / (level + 0.5 * norm)
        shift, rho = level * inverse, 0.5 * norm * inverse
    return inverse, shift, rho


@triton.jit
def images(d, gram, k, keys, weights, fade, onto, PRECISION: tl.constexpr):
    """`onto` + (fade d) H_0 + (weights (d k')) k, rows d in the dtype of `gram`."""
    KIND: tl.constexpr = gram.dtype
    onto = product((d.to(tl.float32) * fade[:, None]).to(KIND), gram, PRECISION, onto)
    pairs = product(d, keys, PRECISION) * weights
    return product(pairs.to(KIND), k, PRECISION, onto)


@triton.jit
def iterate(x, d, r, weight, gram, k, keys, weights, fade, shift, rho, iterations, PRECISION: tl.constexpr):
    """So many iterations; `weights` and `fade` are those of -S / m."""
    KIND: tl.constexpr = gram.dtype
    for _ in range(iterations):
        weight = 4.0 / (4.0 - rho * rho * weight)
        d = ((weight - 1.0)[:, None] * d.to(tl.float32) + weight[:, None] * r).to(KIND)
        x += d.to(tl.float32)
        r = images(d, gram, k, keys, weights, fade, r - shift[:, None] * d.to(tl.float32), PRECISION)
    return x, d, r, weight


@triton.jit
def descend(x, r, gram, k, keys, weights, fade, shift, iterations, PRECISION: tl.constexpr):
    """So many conjugate gradients; `weights` and `fade` are those of -S / m."""
    KIND: tl.constexpr = gram.dtype
    d, square = r.to(KIND), tl.sum(r * r, 1)
    for _ in range(iterations):
        wide = d.to(tl.float32)
        change = images(d, gram, k, keys, weights, fade, -shift[:, None] * wide, PRECISION)
        curve = -tl.sum(wide * change, 1)
        step = tl.where(curve > 0, square / tl.where(curve > 0, curve, 1.0), 0.0)[:, None]
        x += step * wide
        r += step * change
        left = tl.sum(r * r, 1)
        ratio = tl.where(square > 0, left / tl.where(square > 0, square, 1.0), 0.0)
        d, square = (r + ratio[:, None] * wide).to(KIND), left
    return x, r


@triton.jit
def residual(x, rhs, gram, rest, k, keys, weights, fade, shift, PRECISION: tl.constexpr):
    """rhs - S x / m in full: of x, H_0 and what lies between them in two parts each."""
    KIND: tl.constexpr = gram.dtype
    above = x.to(KIND)
    below = (x - above.to(tl.float32)).to(KIND)
    r = product(below, gram, PRECISION, product(above, rest, PRECISION))
    r = fade[:, None] * product(above, gram, PRECISION, r)
    pairs = product(above, keys, PRECISION, product(below, keys, PRECISION)) * weights
    some = pairs.to(KIND)
    r = product((pairs - some.to(tl.float32)).to(KIND), k, PRECISION, product(some, k, PRECISION, r))
    return r + (rhs - shift[:, None] * x)


@triton.jit(do_not_specialize=[*LOOSE, "iterations"])
def solve(
    rhs, k, log_decay, gain, high, low, norms, solution, table, length, tiles, iterations, level,
    rhs_token, rhs_head, k_token, k_head, G, RHS_SHARE, SHARE,
    K: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, DECAYS: tl.constexpr,
    GAINS: tl.constexpr, ADAPTIVE: tl.constexpr, SPLITS: tl.constexpr, CONJUGATE: tl.constexpr, NOTHING: tl.constexpr,
    REFRESH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S^{-1} rhs of a tile's tokens."""
    KIND: tl.constexpr = high.dtype.element_ty
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    if count <= 0:
        return
    row, slot = token * G + head, index.to(tl.int64) * G + head
    t, column = tl.arange(0, SIZE), tl.arange(0, P)
    gram = load_square(high + slot * K * K, column, column, K, P)
    k = load_rows(k + token * k_token + head // SHARE * k_head, k_token, count, column, K, SIZE)
    keys = tl.trans(k)
    rhs += token * rhs_token + head // RHS_SHARE * rhs_head
    inverse, shift, rho = scales(load_per_token(norms + row, count, G, SIZE), level, ADAPTIVE, NOTHING)
    weights, fade = tl.where(t[:, None] >= t[None, :], -inverse[:, None], 0.0), -inverse
    if DECAYS:
        since, _total = elapsed(log_decay, token, count, head, G, SIZE)
        weights, fade = between(since, SIZE) * -inverse[:, None], tl.exp(since.to(tl.float32)) * -inverse
    if GAINS:
        weights *= load_per_token(gain + row, count, G, SIZE)[None, :]

    r = load_rows(rhs, rhs_token, count, column, K, SIZE).to(tl.float32)
    if CONJUGATE:
        x = tl.zeros([SIZE, P], tl.float32)
        if SPLITS:
            first = (iterations + 1) // 2
            x, r = descend(x, r, gram, k, keys, weights, fade, shift, first, PRECISION)
            rest = load_square(low + slot * K * K, column, column, K, P)
            again = load_rows(rhs, rhs_token, count, column, K, SIZE).to(tl.float32)
            r = residual(x, again, gram, rest, k, keys, weights, fade, shift, PRECISION)
            iterations -= first
        x, r = descend(x, r, gram, k, keys, weights, fade, shift, iterations, PRECISION)
    else:
        d = r.to(KIND)
        x = d.to(tl.float32)
        r = images(d, gram, k, keys, weights, fade, r - shift[:, None] * x, PRECISION)
        weight = rho * 0.0 + 2.0
        if SPLITS:
            first = tl.minimum(iterations, REFRESH)
            x, d, r, weight = iterate(x, d, r, weight, gram, k, keys, weights, fade, shift, rho, first, PRECISION)
            rest = load_square(low + slot * K * K, column, column, K, P)
            again = load_rows(rhs, rhs_token, count, column, K, SIZE).to(tl.float32)
            r = residual(x, again, gram, rest, k, keys, weights, fade, shift, PRECISION)
            iterations -= first
        x, d, r, weight = iterate(x, d, r, weight, gram, k, keys, weights, fade, shift, rho, iterations, PRECISION)
    store_rows(solution + row * K, G * K, count, column, x * inverse[:, None], K, SIZE)


def solve_all(
    s: Shape,
    rhs: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    high: Tensor,
    low: Tensor,
    norms: Tensor,
    solution: Tensor,
    adaptive: bool,
    level: float,
    conjugate: bool,
    iterations: int,
) -> None:
    """S^{-1} rhs into `solution` `[B, T, G, K]`; `rhs` has as many heads, or those of the keys."""
    heads = solution.shape[2]
    solve[s.grid](
        rhs, k, k if log_decay is None else log_decay, k if gain is None else gain, high, low, norms, solution,
        *s.tiles, iterations, level, *strides(rhs, k), heads, heads // rhs.shape[2], s.share,
        DECAYS=log_decay is not None, GAINS=gain is not None, ADAPTIVE=adaptive, SPLITS=s.splits, CONJUGATE=conjugate,
        NOTHING=NOTHING, REFRESH=REFRESH, **s.compiled,
    )  # fmt: skip
