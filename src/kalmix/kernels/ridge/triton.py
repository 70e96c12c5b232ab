"""`ridge` in Triton, forward: the solution of every token's normal equations (its read-out is the op `additive`).

H is a memory whose values are its keys. It is carried from tile to tile by the kernel of `additive`; then every tile by
itself finds the norms of its tokens' H and solves. In a tile entered with H_0, with A(t, s) the decay from token s to
token t, the systems of all tokens are applied at once, rows d_t to rows S_t d_t:

    S d = A(t, entry) d H_0 + ((d k') A(t, s) g_s)_{s <= t} k + ridge_t d

Chebyshev iteration keeps x, its last step d and its residual r, from which the products subtract S d. Steps are rounded
to the inputs' dtype, as tensor cores take them. What that, and H_0 so rounded, make of the residual is put right once,
after `REFRESH` iterations, from S x in full: so steps that are small by then carry small errors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.primitives.triton_decays import between, elapsed, pace
from kalmix.kernels.primitives.triton_filter import carried, strides
from kalmix.kernels.primitives.triton_memory import carry
from kalmix.kernels.primitives.triton_tiles import (
    LOOSE,
    Cut,
    cut_tokens,
    load_per_token,
    load_rows,
    load_state,
    precision,
    product,
    rows,
    store_rows,
    tile_of,
)
from kalmix.kernels.ridge.systems import NOTHING
from kalmix.segments import Segments

REFRESH = 10
BLOCK = 64


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
    pairs = product(d, keys, PRECISION) * weights
    onto = product((d.to(tl.float32) * fade[:, None]).to(KIND), gram, PRECISION, onto)
    return product(pairs.to(KIND), k, PRECISION, onto)


@triton.jit
def iterate(x, d, r, weight, gram, k, keys, weights, fade, shift, rho, iterations, PRECISION: tl.constexpr):
    """So many iterations; `weights` and `fade` are those of -S / m."""
    KIND: tl.constexpr = gram.dtype
    for _ in range(iterations):
        weight = 4.0 / (4.0 - rho * rho * weight)
        d = ((weight - 1.0)[:, None] * d.to(tl.float32) + weight[:, None] * r).to(KIND)
        x += d.to(tl.float32)
        r = images(d, gram, k, keys, weights, fade, r, PRECISION) - shift[:, None] * d.to(tl.float32)
    return x, d, r, weight


@triton.jit
def solved(
    rhs, state, gram, k, keys, weights, fade, shift, rho, iterations,
    K: tl.constexpr, P: tl.constexpr, REFRESH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m S^{-1} rhs, float32 rows. `state` is where H_0 is in full, and `gram` H_0 in the dtype of products."""
    KIND: tl.constexpr = gram.dtype
    d = rhs.to(KIND)
    x = d.to(tl.float32)
    r = images(d, gram, k, keys, -weights, -fade, rhs - shift[:, None] * x, PRECISION)
    weight = rho * 0.0 + 2.0
    if tl.float32 == KIND:
        x, d, r, weight = iterate(x, d, r, weight, gram, k, keys, -weights, -fade, shift, rho, iterations, PRECISION)
    else:
        first = tl.minimum(iterations, REFRESH)
        x, d, r, weight = iterate(x, d, r, weight, gram, k, keys, -weights, -fade, shift, rho, first, PRECISION)
        column = tl.arange(0, P)
        high = x.to(KIND)
        low = (x - high.to(tl.float32)).to(KIND)
        rest = (load_state(state, column, column, K, K) - gram.to(tl.float32)).to(KIND)
        y = product(high, gram, PRECISION, product(low, gram, PRECISION, product(high, rest, PRECISION)))
        pairs = product(high, keys, PRECISION, product(low, keys, PRECISION)) * weights
        above = pairs.to(KIND)
        y = fade[:, None] * y + product((pairs - above.to(tl.float32)).to(KIND), k, PRECISION)
        r = rhs - shift[:, None] * x - product(above, k, PRECISION, y)
        x, d, r, weight = iterate(
            x, d, r, weight, gram, k, keys, -weights, -fade, shift, rho, iterations - first, PRECISION
        )
    return x


@triton.jit(do_not_specialize=[*LOOSE, "iterations"])
def regress(
    q, k, log_decay, gain, mix, states, mixed, solution, norms, read, table, length, tiles, iterations, level,
    q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, DECAYS: tl.constexpr,
    GAINS: tl.constexpr, MIXES: tl.constexpr, ADAPTIVE: tl.constexpr, NOTHING: tl.constexpr, REFRESH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a tile's tokens: ||H||_F, x, mix x + (1 - mix) q, and q'x."""
    KIND: tl.constexpr = mixed.dtype.element_ty
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    if count <= 0:
        return
    row = token * G + head
    t, column = tl.arange(0, SIZE), tl.arange(0, P)
    k = load_rows(k + token * k_token + head // SHARE * k_head, k_token, count, column, K, SIZE).to(KIND)
    q += token * q_token + head // SHARE * q_head
    states += (index.to(tl.int64) * G + head) * K * K
    gram = load_state(states, column, column, K, K)
    before = tl.sum(tl.sum(gram * gram, 1), 0)
    gram = gram.to(KIND)
    keys = tl.trans(k)
    weights = tl.where(t[:, None] >= t[None, :], 1.0, 0.0)
    fade = tl.full([SIZE], 1.0, tl.float32)
    if DECAYS:
        since, _total = elapsed(log_decay, token, count, head, G, SIZE)
        weights, fade = between(since, SIZE), tl.exp(since.to(tl.float32))
    weight = tl.full([SIZE], 1.0, tl.float32)
    decays = weights
    if GAINS:
        weight = load_per_token(gain + row, count, G, SIZE)
        weights *= weight[None, :]
    key = k.to(tl.float32)
    image = images(k, gram, k, keys, weights, fade, tl.zeros([SIZE, P], tl.float32), PRECISION)
    length_ = tl.sum(key * key, 1) * weight
    gained = 2.0 * weight * tl.sum(key * image, 1) - length_ * length_
    square = fade * fade * before + tl.sum(decays * decays * gained[None, :], 1)
    norm = tl.sqrt(tl.maximum(square, 0.0))
    inverse, shift, rho = scales(norm, level, ADAPTIVE, NOTHING)

    rhs = load_rows(q, q_token, count, column, K, SIZE).to(tl.float32)
    x = solved(
        rhs, states, gram, k, keys, weights * inverse[:, None], fade * inverse, shift, rho, iterations,
        K, P, REFRESH, PRECISION,
    ) * inverse[:, None]  # fmt: skip
    rhs = load_rows(q, q_token, count, column, K, SIZE).to(tl.float32)
    store_rows(solution + row * K, G * K, count, column, x, K, SIZE)
    tl.store(norms + row + t * G, norm, mask=t < count)
    tl.store(read + row + t * G, tl.sum(rhs * x, 1), mask=t < count)
    if MIXES:
        share = load_per_token(mix + row, count, G, SIZE)[:, None]
        store_rows(mixed + row * K, G * K, count, column, share * x + (1.0 - share) * rhs, K, SIZE)


def tiles_of(k: Tensor, rows_: Tensor | None, size: int) -> Cut:
    """The tiles of a call, by the rows of `Segments`."""
    return cut_tokens(k.shape[0], k.shape[1], size, None if rows_ is None else Segments(rows_), k)


def options(k: Tensor, packed: bool, size: int) -> dict[str, object]:
    """What the kernels of tiles compile for, and how they are launched."""
    width = k.shape[3]
    lanes = max(16, triton.next_power_of_2(width))
    warps = 4 if lanes <= 128 else 8
    found = {"K": width, "P": lanes, "SIZE": size, "PACKED": packed, "PRECISION": precision(k.dtype)}
    return found | {"num_warps": warps, "num_stages": 1}


def forward(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    prior: Tensor,
    rows_: Tensor | None,
    adaptive: bool,
    level: float,
    iterations: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x mixed, q'x, the last H, and, kept: x (if it is not what is mixed), norms, H at every tile's entry.

    q and k are bfloat16 or float32.
    """
    (batch, length, shared, width), heads = k.shape, prior.shape[1]
    cut, q, k = tiles_of(k, rows_, size), rows(q), rows(k)
    own = k if heads == shared else k.repeat_interleave(heads // shared, 2)
    like, single = {"dtype": k.dtype, "device": k.device}, {"dtype": torch.float32, "device": k.device}
    tokens = torch.empty if rows_ is None else torch.zeros  # tokens outside every segment write nothing
    given = options(k, rows_ is not None, size)
    log_decay, gain, mix = (None if x is None else x.contiguous() for x in (log_decay, gain, mix))
    weight = k if gain is None else gain
    entering = leaving = weight
    across = k
    if log_decay is not None:
        entering, leaving = torch.empty(2, batch, length, heads, **single)
        across = torch.empty(cut.count, heads, **single)
        pace[cut.count, heads](
            log_decay, weight, entering, leaving, across, cut.table, length, cut.tiles, heads,
            SIZE=size, PACKED=rows_ is not None, GAINS=gain is not None, num_warps=1,
        )  # fmt: skip
    states, last = torch.empty(cut.count, heads, width, width, **single), torch.empty(prior.shape, **single)
    shape = {"K": width, "V": width, "BLOCK": BLOCK, "SIZE": size}
    plan = carried(cut.sequences, heads, shape, torch.float32, 2)
    carry[cut.sequences, heads, triton.cdiv(width, plan["VALUES"])](
        own, own, own, own, states, prior, last, leaving, across, cut.runs, length, cut.tiles,
        *strides(own, own), *prior.stride(), heads, 1,
        PACKED=rows_ is not None, DECAYS=log_decay is not None, KEYED=False,
        SCALED=log_decay is not None or gain is not None, CORRECTS=False, PRECISION=given["PRECISION"],
        num_warps=4, **plan, **shape,
    )  # fmt: skip
    solution = tokens(batch, length, heads, width, **like)
    mixed = solution if mix is None else torch.zeros_like(solution) if rows_ is not None else torch.empty_like(solution)
    norms, read = tokens(batch, length, heads, **single), tokens(batch, length, heads, 1, **single)
    regress[cut.count, heads](
        q, k, k if log_decay is None else log_decay, weight, k if mix is None else mix, states, mixed, solution, norms,
        read, cut.table, length, cut.tiles, iterations, level, *strides(q, k), heads, heads // shared,
        DECAYS=log_decay is not None, GAINS=gain is not None, MIXES=mix is not None, ADAPTIVE=adaptive,
        NOTHING=NOTHING, REFRESH=REFRESH, **given,
    )  # fmt: skip
    return mixed, read, last, solution.new_empty(0) if mix is None else solution, norms, states
