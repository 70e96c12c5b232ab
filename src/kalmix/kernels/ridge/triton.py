"""`ridge` in Triton, forward: the solution of every token's normal equations (its read-out is the op `additive`).

H is a memory whose values are its keys. In a tile of tokens entered with H_0, with A(t, s) the decay from token s to
token t, the systems of all its tokens are applied at once, rows d_t to rows S_t d_t:

    S d = A(t, entry) d H_0 + ((d k') A(t, s) g_s)_{s <= t} k + ridge_t d

There are four launches: `advance`, H from tile to tile, noting it at every entry; `measure`, the norms of tokens' H;
`solve`; `blend`, what is read with. All but the first work on all tiles at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.primitives.triton_decays import between, elapsed, pace
from kalmix.kernels.primitives.triton_filter import strides
from kalmix.kernels.primitives.triton_tiles import (
    LOOSE,
    load_columns,
    load_per_token,
    load_rows,
    product,
    rows,
    run_of,
    store_rows,
    tile_of,
)
from kalmix.kernels.ridge.triton_solve import (
    images,
    load_square,
    shape_of,
    solve_all,
    store_square,
)


@triton.jit(do_not_specialize=LOOSE)
def advance(
    k, leaving, across, prior, last, high, low, squares, runs, length, tiles, k_token, k_head,
    prior_n, prior_g, prior_i, prior_j, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
    DECAYS: tl.constexpr, SCALED: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some columns of H of one sequence and head, from tile to tile: rounded to `high`, what is left of it to `low`."""
    KIND: tl.constexpr = high.dtype.element_ty
    sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, P), part * VALUES + tl.arange(0, VALUES)
    tile, token, tokens = run_of(runs, sequence, length, tiles, PACKED)
    inside = (row < K)[:, None] & (column < K)[None, :]
    prior += sequence * prior_n + head * prior_g
    state = tl.load(prior + row[:, None] * prior_i + column[None, :] * prior_j, mask=inside, other=0.0)
    k += head // SHARE * k_head
    for i in tl.range(0, tl.cdiv(tokens, SIZE), num_stages=STAGES):
        count = tl.minimum(tokens - i * SIZE, SIZE)
        at, slot = token + i * SIZE, (tile + i) * G + head
        above = state.to(KIND)
        store_square(high + slot * K * K, row, column, above, K, P)
        if SPLITS:
            store_square(low + slot * K * K, row, column, state - above.to(tl.float32), K, P)
        tl.store(squares + slot * tl.num_programs(2) + part, tl.sum(tl.sum(state * state, 1), 0))
        right = load_rows(k + at * k_token, k_token, count, column, K, SIZE)
        if SCALED:
            weight = load_per_token(leaving + at * G + head, count, G, SIZE)[:, None]
            right = (right.to(tl.float32) * weight).to(KIND)
        if DECAYS:
            state *= tl.load(across + slot)
        state = product(load_columns(k + at * k_token, k_token, count, row, K, SIZE), right, PRECISION, state)
    store_square(last + (sequence * G + head) * K * K, row, column, state, K, P)


@triton.jit(do_not_specialize=LOOSE)
def measure(
    k, log_decay, gain, high, squares, norms, table, length, tiles, k_token, k_head, G, SHARE, parts,
    K: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, DECAYS: tl.constexpr,
    GAINS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """||H||_F of a tile's tokens: its square decays twice as fast as H and gains 2 g k'H k - g^2 |k|^4."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    if count <= 0:
        return
    row, slot = token * G + head, index.to(tl.int64) * G + head
    t, column = tl.arange(0, SIZE), tl.arange(0, P)
    k += token * k_token + head // SHARE * k_head
    before = 0.0
    for part in range(parts):
        before += tl.load(squares + slot * parts + part)
    decays, fade = tl.where(t[:, None] >= t[None, :], 1.0, 0.0), tl.full([SIZE], 1.0, tl.float32)
    if DECAYS:
        since, _total = elapsed(log_decay, token, count, head, G, SIZE)
        decays, fade = between(since, SIZE), tl.exp(since.to(tl.float32))
    weight = tl.full([SIZE], 1.0, tl.float32)
    if GAINS:
        weight = load_per_token(gain + row, count, G, SIZE)
    key = load_rows(k, k_token, count, column, K, SIZE)
    nothing = tl.zeros([SIZE, P], tl.float32)
    gram = load_square(high + slot * K * K, column, column, K, P)
    image = images(key, gram, key, tl.trans(key), decays * weight[None, :], fade, nothing, PRECISION)
    again = load_rows(k, k_token, count, column, K, SIZE).to(tl.float32)
    own = tl.sum(again * again, 1) * weight
    gained = 2.0 * weight * tl.sum(again * image, 1) - own * own
    square = fade * fade * before + tl.sum(decays * decays * gained[None, :], 1)
    tl.store(norms + row + t * G, tl.sqrt(tl.maximum(square, 0.0)), mask=t < count)


@triton.jit(do_not_specialize=LOOSE)
def blend(
    q, mix, solution, mixed, read, table, length, tiles, q_token, q_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, MIXES: tl.constexpr,
):  # fmt: skip
    """mix x + (1 - mix) q and q'x of a tile's tokens."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    row, t, column = token * G + head, tl.arange(0, SIZE), tl.arange(0, P)
    q += token * q_token + head // SHARE * q_head
    query = load_rows(q, q_token, count, column, K, SIZE).to(tl.float32)
    x = load_rows(solution + row * K, G * K, count, column, K, SIZE).to(tl.float32)
    tl.store(read + row + t * G, tl.sum(query * x, 1), mask=t < count)
    if MIXES:
        share = load_per_token(mix + row, count, G, SIZE)[:, None]
        store_rows(mixed + row * K, G * K, count, column, share * x + (1.0 - share) * query, K, SIZE)


def forward(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    prior: Tensor,
    segments: Tensor | None,
    adaptive: bool,
    level: float,
    conjugate: bool,
    iterations: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x mixed, q'x, the last H, and, kept: x (if it is not what is mixed), norms, H at every tile's entry in two parts.

    q and k are bfloat16 or float32.
    """
    (batch, length, _, width), heads = k.shape, prior.shape[1]
    s = shape_of(k, heads, segments, size)
    q, k = rows(q), rows(k)
    like, single = {"dtype": k.dtype, "device": k.device}, {"dtype": torch.float32, "device": k.device}
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment write nothing
    log_decay, gain, mix = (None if x is None else x.contiguous() for x in (log_decay, gain, mix))
    log, weight, decays = k if log_decay is None else log_decay, k if gain is None else gain, log_decay is not None
    leaving, across = weight, k
    if decays:
        entering, leaving = torch.empty(2, batch, length, heads, **single)
        across = torch.empty(s.cut.count, heads, **single)
        pace[s.grid](
            log, weight, entering, leaving, across, *s.tiles, heads,
            SIZE=size, PACKED=segments is not None, GAINS=gain is not None, num_warps=1,
        )  # fmt: skip
    high = torch.empty(s.cut.count, heads, width, width, **like)
    low = torch.empty_like(high) if s.splits else high.new_empty(0)
    last, parts = torch.empty(prior.shape, **single), triton.cdiv(s.lanes, s.strip)
    squares = torch.empty(s.cut.count, heads, parts, **single)
    advance[s.cut.sequences, heads, parts](
        k, leaving, across, prior, last, high, low, squares, s.cut.runs, length, s.cut.tiles, *strides(k),
        *prior.stride(), heads, s.share, VALUES=s.strip, DECAYS=decays, SCALED=decays or gain is not None,
        SPLITS=s.splits, STAGES=2, **s.compiled | {"num_warps": 4},
    )  # fmt: skip
    norms = tokens(batch, length, heads, **single)
    kinds = {"DECAYS": decays, "GAINS": gain is not None}
    measure[s.grid](
        k, log, weight, high, squares, norms, *s.tiles, *strides(k), heads, s.share, parts, **kinds, **s.compiled,
    )  # fmt: skip
    solution = tokens(batch, length, heads, width, **like)
    solve_all(s, q, k, log_decay, gain, high, low, norms, solution, adaptive, level, conjugate, iterations)
    mixed = solution if mix is None else tokens(solution.shape, **like)
    read = tokens(batch, length, heads, 1, **single)
    blend[s.grid](
        q, k if mix is None else mix, solution, mixed, read, *s.tiles, *strides(q), heads, s.share,
        MIXES=mix is not None, **{name: x for name, x in s.compiled.items() if name != "PRECISION"},
    )  # fmt: skip
    return mixed, read, last, solution.new_empty(0) if mix is None else solution, norms, high, low
