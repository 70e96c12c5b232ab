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
    LOOSE,
    Cut,
    cut_tokens,
    load_per_token,
    place_of,
    precision,
    product,
    tile_of,
)
from kalmix.segments import segments_without_checks

FAINT = tl.constexpr(1e-26)  # a share of H_0 that is as good as none
FORGOTTEN = tl.constexpr(-1e4)  # a log-decay that leaves nothing


class Shape(NamedTuple):
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

    cut: Cut
    heads: int
    grid: tuple[int]
    tiles: tuple[Any, ...]
    share: int
    strips: tuple[int, int]
    compiled: dict[str, Any]
    solved: dict[str, int]
    carried: dict[str, int]


def shape_of(k: Tensor, v: Tensor, segments: Tensor | None, size: int) -> Shape:
    """By rule, from widths and dtypes; `segments` are the rows of `Segments`."""
    (batch, length, shared, width), (heads, values) = k.shape, v.shape[2:]
    cut = cut_tokens(batch, length, size, None if segments is None else segments_without_checks(segments), k)
    lanes = max(16, triton.next_power_of_2(width))
    strip = min(lanes, 64 if lanes <= 128 else 32)
    while strip > 32 and cut.sequences * heads * (lanes // strip) < 128:
        strip //= 2
    strips = triton.cdiv(width, strip)
    compiled = {"K": width, "V": values, "P": lanes, "SIZE": size, "PACKED": segments is not None}
    solved = {"num_warps": 4 if lanes <= 128 else 8, "num_stages": 1}
    ahead = k.dtype == torch.bfloat16 and width % 4 == 0  # as in `primitives.triton_filter.carried`
    carried = {"VALUES": strip, "STAGES": 2 if ahead else 1, "num_warps": 4}
    return Shape(
        cut=cut,
        heads=heads,
        grid=(cut.count * heads,),
        tiles=(cut.table, length, cut.tiles),
        share=heads // shared,
        strips=(strips, strips + triton.cdiv(values, strip)),
        compiled=compiled | {"PRECISION": precision(k.dtype)},
        solved=solved,
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
def load_state(base, row, column, stride, step, K: tl.constexpr, V: tl.constexpr):
    """A block of a `[K, V]` of any strides, 0 beyond."""
    inside = (row < K)[:, None] & (column < V)[None, :]
    return tl.load(base + row[:, None] * stride + column[None, :] * step, mask=inside, other=0.0)


@triton.jit
def store_block(base, row, column, x, K: tl.constexpr, V: tl.constexpr):
    at, x = base + row[:, None] * V + column[None, :], x.to(base.dtype.element_ty)
    if whole(K, row.shape[0]) and whole(V, column.shape[0]):
        tl.store(at, x)
    else:
        tl.store(at, x, mask=(row < K)[:, None] & (column < V)[None, :])


@triton.jit
def load_numbers(base, slot, SIZE: tl.constexpr):
    """One number a token of a tile, `[SIZE]`, from where they lie side by side."""
    return tl.load(base + slot * SIZE + tl.arange(0, SIZE))


@triton.jit
def store_numbers(base, slot, x):
    SIZE: tl.constexpr = x.shape[0]
    tl.store(base + slot * SIZE + tl.arange(0, SIZE), x)


@triton.jit
def tile_here(table, length, tiles, G, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """A program's head, and of its tile the first token, how many, its row `[B * T * G]`, its slot `[tiles * G]`."""
    index, head, _part = place_of(G, 1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    return head, token, count, token * G + head, index.to(tl.int64) * G + head


@triton.jit(do_not_specialize=LOOSE)
def pace(
    log_decay, gain, since, beyond, entering, leaving, weights, across, table, length, tiles, G,
    SIZE: tl.constexpr, PACKED: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """Log-decay from a tile's entry to each token, in two parts; A(t, entry); g_t A(exit, t); g_t; A(exit, entry)."""
    _head, _token, count, row, slot = tile_here(table, length, tiles, G, SIZE, PACKED)
    rest = tl.full([SIZE], 1.0, tl.float32)
    if DECAYS:
        each = load_per_token(log_decay + row, count, G, SIZE)
        each = tl.maximum(each, FORGOTTEN).to(tl.float64)  # or sums would have no digits left for what decays a little
        now, total = tl.cumsum(each, 0), tl.sum(each, 0)
        high = now.to(tl.float32)
        store_numbers(since, slot, high)
        store_numbers(beyond, slot, (now - high.to(tl.float64)).to(tl.float32))
        store_numbers(entering, slot, tl.exp(high))
        tl.store(across + slot, tl.exp(total.to(tl.float32)))
        rest = tl.exp((total - now).to(tl.float32))
    if GAINS:
        weight = load_per_token(gain + row, count, G, SIZE)
        store_numbers(weights, slot, weight)
        rest *= weight
    store_numbers(leaving, slot, rest)


class Pace(NamedTuple):
    """What decays and gains of a call come to, a number a token and tile: `[tiles, heads, SIZE]`; see `pace`."""

    since: Tensor
    beyond: Tensor
    entering: Tensor
    leaving: Tensor
    weights: Tensor
    across: Tensor  # [tiles, heads]


def paced(s: Shape, log_decay: Tensor | None, gain: Tensor | None, placeholder: Tensor) -> Pace:
    """The pace of a call; placeholders where it has neither decays nor gains."""
    if log_decay is None and gain is None:
        return Pace(*[placeholder] * 6)
    size = s.cut.size
    found = torch.empty(5, s.cut.count, s.heads, size, dtype=torch.float32, device=placeholder.device)
    across = torch.empty(s.cut.count, s.heads, dtype=torch.float32, device=placeholder.device)
    given = (placeholder if x is None else x.contiguous() for x in (log_decay, gain))
    kinds = {"DECAYS": log_decay is not None, "GAINS": gain is not None, "PACKED": s.compiled["PACKED"]}
    arguments = (*given, *found, across, *s.tiles, s.heads)
    Launch(pace, s.grid, arguments, {"SIZE": size, "num_warps": 1, **kinds}).run()
    return Pace(*found, across)


@triton.jit
def lags(since, beyond, slot, SIZE: tl.constexpr):
    """Log-decay from token s to token t, `[t, s]`, above 0 where t < s: a difference as in float64."""
    high, low = load_numbers(since, slot, SIZE), load_numbers(beyond, slot, SIZE)
    return (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])


@triton.jit
def paths(since, beyond, entering, weights, slot, SIZE: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr):
    """Of a tile: A(t, s) `[t, s]`, 0 where t < s; gains; A(t, entry)."""
    t = tl.arange(0, SIZE)
    decays = tl.where(t[:, None] >= t[None, :], 1.0, 0.0)
    weight, fade = tl.full([SIZE], 1.0, tl.float32), tl.full([SIZE], 1.0, tl.float32)
    if DECAYS:
        decays = tl.exp(tl.where(t[:, None] >= t[None, :], lags(since, beyond, slot, SIZE), float("-inf")))
        fade = load_numbers(entering, slot, SIZE)
    if GAINS:
        weight = load_numbers(weights, slot, SIZE)
    return decays, weight, fade


@triton.jit
def along(a, b, PRECISION: tl.constexpr):
    """a_t'b_t of every token. From registers that hold other rows, tensor cores are the shorter way."""
    if b.dtype == tl.float32:
        return tl.sum(a * b, 1)
    return diagonal(product(a.to(b.dtype), tl.trans(b), PRECISION))


@triton.jit
def diagonal(x):
    """Of a square."""
    t = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(t[:, None] == t[None, :], x, 0.0), 1)


@triton.jit
def images(d, gram, k, weights, onto, PRECISION: tl.constexpr):
    """`onto` + d H_0 + ((d k') weights) k, rows d in the dtype of `gram`."""
    KIND: tl.constexpr = gram.dtype
    onto = product(d, gram, PRECISION, onto)
    return product((product(d, tl.trans(k), PRECISION) * weights).to(KIND), k, PRECISION, onto)


@triton.constexpr_function
def lengthened(kind):
    """What makes up for `shortened`, on average: of digits evenly spread it takes 2^-8 / (2 ln 2), and 0 of float32."""
    return 1.00283 if kind == tl.bfloat16 else 1.0


@triton.jit
def shortened(x, kind):
    """`x` without the digits that a dtype does not keep: cut, not rounded, it keeps its half of a register."""
    if kind == tl.bfloat16:
        x = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return x


@triton.jit
def chebyshev(rhs, gram, k, weights, fade, shift, rho, iterations, PRECISION: tl.constexpr):
    """So many iterations; `weights` and `shift` are those of S / (m fade), and r is -1 / fade of what is left.

    A direction that is made where it is multiplied stays in registers.
    """
    KIND: tl.constexpr = gram.dtype
    x, r = tl.zeros(rhs.shape, tl.float32), rhs * (-1.0 / fade)[:, None]
    if gram.shape[0] > 128:  # 8 warps, of which two share a token: directions go by shared memory
        weight, d = 2.0 + 0.0 * rho, rhs.to(KIND)
        for _ in range(iterations):
            wide = d.to(tl.float32)
            x += wide
            r = images(d, gram, k, weights, r + shift[:, None] * wide, PRECISION)
            weight = 4.0 / (4.0 - rho * rho * weight)
            d = ((weight - 1.0) * wide - (weight * fade[:, None]) * r).to(KIND)
        return x + d.to(tl.float32)
    weight, d = 1.0 + 0.0 * rho, tl.zeros(rhs.shape, KIND)
    for i in range(iterations):
        more = lengthened(KIND) * weight
        wide = shortened((more - lengthened(KIND)) * d.to(tl.float32) - (more * fade[:, None]) * r, KIND)
        x += wide
        d = wide.to(KIND)
        r = images(d, gram, k, weights, r + shift[:, None] * wide, PRECISION)
        weight = 4.0 / (4.0 - rho * rho * tl.where(i == 0, 2.0, weight))
    return x + ((weight - 1.0) * d.to(tl.float32) - (weight * fade[:, None]) * r)


@triton.constexpr_function
def resolved(kind):
    """Return the least ridge, relative to ||H||_F, that outweighs the rounding of H, which is kept in this dtype."""
    return 2.0**-10 if kind == tl.bfloat16 else 2.0**-23


@triton.jit
def conjugate(rhs, gram, k, weights, fade, shift, iterations, PRECISION: tl.constexpr):
    """So many conjugate gradients; `weights` and `shift` are those of S / (m fade).

    A token stays where it is once its residual is rounding, or its curvature not positive: what follows is noise.
    """
    KIND: tl.constexpr = gram.dtype
    x, d, r, square = tl.zeros(rhs.shape, tl.float32), tl.zeros(rhs.shape, KIND), rhs, tl.sum(rhs * rhs, 1)
    ratio, least = 0.0 * square, 1e-16 * square
    for _ in range(iterations):
        wide = shortened(r + ratio[:, None] * d.to(tl.float32), KIND)
        d = wide.to(KIND)
        image = images(d, gram, k, weights, shift[:, None] * wide, PRECISION)
        curve = fade * tl.sum(wide * image, 1)
        step = tl.where(curve > 0, square / tl.where(curve > 0, curve, 1.0), 0.0)
        x += step[:, None] * wide
        r -= (step * fade)[:, None] * image
        left = tl.sum(r * r, 1)
        left = tl.where((left > least) & (step > 0), left, 0.0)
        ratio = tl.where(square > 0, left / tl.where(square > 0, square, 1.0), 0.0)
        square = left
    return x


@triton.jit
def solve(
    rhs, gram, k, weights, fade, norm, level, iterations,
    ADAPTIVE: tl.constexpr, CONJUGATE: tl.constexpr, MIN_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S^{-1} rhs of a tile's tokens, from H at its entry, keys, paths and norms; and the weights, left in registers.

    All is divided by m, as `systems.scale_of` has it, and by the share of H_0 that is left, so that products with H_0
    need no scaling; by no less than `FAINT`, where all of H_0 is far below `MIN_NORM`. A ratio that is the same for all
    tokens is a number, not a row.
    """
    KIND: tl.constexpr = gram.dtype
    something = norm >= 0.0
    left = tl.maximum(fade, FAINT)
    if ADAPTIVE:
        something = norm > MIN_NORM
        factor = tl.maximum(level, resolved(KIND))
        middle = factor + 0.5
        inverse = 1.0 / (middle * tl.where(something, norm, 1.0))
        ridge, rho = factor * tl.where(something, norm, 1.0), 0.5 / middle
    else:
        ridge = tl.maximum(level, resolved(KIND) * norm)
        inverse = 1.0 / (ridge + 0.5 * norm)
        rho = (0.5 * norm * inverse)[:, None]
    inverse = tl.where(norm < float("inf"), inverse, float("nan"))  # its square overflowed
    weights *= (1.0 / left)[:, None]
    shift, fade = ridge / left, left * inverse
    if CONJUGATE:
        x = conjugate(rhs, gram, k, weights, fade, shift, iterations, PRECISION)
    else:
        x = chebyshev(rhs, gram, k, weights, fade, shift, rho, iterations, PRECISION)
    return x * tl.where(something, inverse, 0.0)[:, None], weights * left[:, None]
