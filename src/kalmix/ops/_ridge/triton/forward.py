"""`ridge` in Triton, forward: H and U from tile to tile, then every tile's solutions and what is read along them.

H and U are memories whose values are the keys, and the values. There are two launches: `advance`, some columns of
either a program, noting both at every tile's entry; `regress`, all tiles at once: the norm of every token's H, which
decays twice as fast as H and whose square gains 2 g k'H k - g^2 |k|^4, the solutions, and U'x mixed with U'q.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._linear_memory.triton.forward import strides
from kalmix.ops._ridge.solvers import MIN_NORM
from kalmix.ops._ridge.triton.solve import (
    along,
    block_of,
    diagonal,
    load_block,
    load_numbers,
    load_state,
    paced,
    paths,
    shape_of,
    solve,
    store_block,
    store_numbers,
    tile_here,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import (
    LOOSE,
    load_columns,
    load_per_token,
    load_rows,
    product,
    rows,
    run_of,
    store_rows,
)


@triton.jit
def carry(
    k, values, states, squares, leaving, across, prior, last, runs, length, tiles, part, k_token, v_token,
    prior_n, prior_g, prior_i, prior_j, G,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VALUES: tl.constexpr, STRIPS: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, SCALED: tl.constexpr, MEASURES: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of a memory of one sequence and head, from tile to tile; squares of what it is at every entry."""
    KIND: tl.constexpr = states.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, P), part * VALUES + tl.arange(0, VALUES)
    tile, token, tokens = run_of(runs, sequence, length, tiles, PACKED)
    state = load_state(prior + sequence * prior_n + head * prior_g, row, column, prior_i, prior_j, K, V)
    for i in tl.range(0, tl.cdiv(tokens, SIZE), num_stages=STAGES):
        count = tl.minimum(tokens - i * SIZE, SIZE)
        at, slot = token + i * SIZE, (tile + i) * G + head
        store_block(states + slot * K * V, row, column, state, K, V)
        if MEASURES:
            tl.store(squares + slot * STRIPS + part, tl.sum(tl.sum(state * state, 1), 0))
        right = load_rows(values + at * v_token, v_token, count, column, V, SIZE)
        left = load_columns(k + at * k_token, k_token, count, row, K, SIZE)
        if DECAYS:
            state *= tl.load(across + slot)
        if SCALED:
            wide = right.to(tl.float32) * load_numbers(leaving, slot, SIZE)[:, None]
            right = wide.to(KIND)
            if right.dtype == tl.bfloat16:  # what is written in two parts: a solution multiplies its rounding
                state = product(left, (wide - right.to(tl.float32)).to(KIND), PRECISION, state)
        state = product(left, right, PRECISION, state)
    store_block(last + (sequence * G + head) * K * V, row, column, state, K, V)


@triton.jit(do_not_specialize=LOOSE)
def advance(
    k, v, grams, crosses, squares, leaving, across, gram, cross, last_gram, last_cross, runs, length, tiles,
    k_token, k_head, v_token, v_head, gram_n, gram_g, gram_i, gram_j, cross_n, cross_g, cross_i, cross_j, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VALUES: tl.constexpr, STRIPS: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of H, or of U, of one sequence and head."""
    head, part = tl.program_id(1), tl.program_id(2)
    k += head // SHARE * k_head
    if part < STRIPS:
        carry(
            k, k, grams, squares, leaving, across, gram, last_gram, runs, length, tiles, part, k_token, k_token,
            gram_n, gram_g, gram_i, gram_j, G,
            K, K, P, VALUES, STRIPS, SIZE, PACKED, DECAYS, SCALED, True, STAGES, PRECISION,
        )  # fmt: skip
    else:
        carry(
            k, v + head * v_head, crosses, squares, leaving, across, cross, last_cross, runs, length, tiles,
            part - STRIPS, k_token, v_token, cross_n, cross_g, cross_i, cross_j, G,
            K, V, P, VALUES, STRIPS, SIZE, PACKED, DECAYS, SCALED, False, STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def measure(key, gram, entry, decays, weight, fade, PRECISION: tl.constexpr):
    """||H||_F of a tile's tokens, from keys, H at the entry and its square."""
    pairs = product(key, tl.trans(key), PRECISION)
    pairs *= pairs
    known = fade * along(product(key, gram, PRECISION), key, PRECISION)
    known += tl.sum(pairs * decays * weight[None, :], 1)
    gained = weight * (2.0 * known - weight * diagonal(pairs))
    square = fade * fade * entry + tl.sum(decays * decays * gained[None, :], 1)
    return tl.sqrt(tl.maximum(square, 0.0, propagate_nan=tl.PropagateNan.ALL))  # NaN where it overflowed


@triton.jit(do_not_specialize=[*LOOSE, "iterations"])
def regress(
    q, k, v, since, beyond, entering, gains, mix, grams, crosses, squares, norms, solution, mean, read, table,
    length, tiles, iterations, level, q_token, q_head, k_token, k_head, v_token, v_head, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, STRIPS: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, GAINS: tl.constexpr, MIXES: tl.constexpr, ADAPTIVE: tl.constexpr,
    CONJUGATE: tl.constexpr, MIN_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x, q'x and U'(mix x + (1 - mix) q) of a tile's tokens."""
    KIND: tl.constexpr = grams.dtype.element_ty
    head, token, count, row, slot = tile_here(table, length, tiles, G, SIZE, PACKED)
    if count <= 0:
        return
    t, lane = tl.arange(0, SIZE), tl.arange(0, P)
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    gram = load_block(grams + slot * K * K, lane, lane, K, K)
    key = load_rows(k, k_token, count, lane, K, SIZE)
    decays, weight, fade = paths(since, beyond, entering, gains, slot, SIZE, DECAYS, GAINS)
    entry = 0.0
    for part in range(STRIPS):
        entry += tl.load(squares + slot * STRIPS + part)
    norm = measure(key, gram, entry, decays, weight, fade, PRECISION)
    store_numbers(norms, slot, norm)
    query = load_rows(q, q_token, count, lane, K, SIZE).to(tl.float32)
    weights = decays * weight[None, :]
    x, weights = solve(
        query, gram, key, weights, fade, norm, level, iterations, ADAPTIVE, CONJUGATE, MIN_NORM, PRECISION
    )
    store_rows(solution + row * K, G * K, count, lane, x, K, SIZE)
    query = load_rows(q, q_token, count, lane, K, SIZE).to(tl.float32)
    tl.store(read + row + t * G, tl.sum(query * x, 1), mask=t < count)

    if MIXES:
        x = query + load_per_token(mix + row, count, G, SIZE)[:, None] * (x - query)
    above = x.to(KIND)
    below = (x - above.to(tl.float32)).to(KIND)
    pairs = (product(above, tl.trans(key), PRECISION) * weights).to(KIND)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        cross = load_block(crosses + slot * K * V, lane, column, K, V)
        answer = product(above, cross, PRECISION)
        if cross.dtype == tl.bfloat16:  # x in two parts: where keys repeat, it is long beside what is read of it
            answer = product(below, cross, PRECISION, answer)
        value = load_rows(v + token * v_token + head * v_head, v_token, count, column, V, SIZE)
        answer = product(pairs, value, PRECISION, answer * fade[:, None])
        store_rows(mean + row * V, G * V, count, column, answer, V, SIZE)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    cross: Tensor,
    gram: Tensor,
    segments: Tensor | None,
    adaptive: bool,
    level: float,
    conjugate: bool,
    iterations: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The mean, q'x, the last U and H; and, kept: x, norms, H and U at every tile's entry.

    q, k and v are bfloat16 or float32.
    """
    (batch, length, _, width), (heads, values) = k.shape, v.shape[2:]
    s = shape_of(k, v, segments, size)
    q, k, v = rows(q), rows(k), rows(v)
    like, single = {"dtype": k.dtype, "device": k.device}, {"dtype": torch.float32, "device": k.device}
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment write nothing
    share, clock = k if mix is None else mix.contiguous(), paced(s, log_decay, gain, k)
    kinds = {"DECAYS": log_decay is not None, "GAINS": gain is not None}
    grams, crosses = (torch.empty(s.cut.count, heads, width, x, **like) for x in (width, values))
    last_gram, last_cross = (torch.empty(x.shape, **single) for x in (gram, cross))
    squares = torch.empty(s.cut.count, heads, s.strips[0], **single)
    arguments = (
        k, v, grams, crosses, squares, clock.leaving, clock.across, gram, cross, last_gram, last_cross, s.cut.runs,
        length, s.cut.tiles, *strides(k, v), *gram.stride(), *cross.stride(), heads, s.share,
    )  # fmt: skip
    options = {"STRIPS": s.strips[0], "DECAYS": kinds["DECAYS"], "SCALED": any(kinds.values())}
    options |= s.carried | s.compiled
    Launch(advance, (s.cut.sequences, heads, s.strips[1]), arguments, options).run()
    solution, norms = tokens(batch, length, heads, width, **like), torch.empty(s.cut.count, heads, size, **single)
    mean, read = tokens(v.shape, **like), tokens(batch, length, heads, 1, **single)
    arguments = (
        q, k, v, *clock[:3], clock.weights, share, grams, crosses, squares, norms, solution, mean, read,
        *s.tiles, iterations, level, *strides(q, k, v), heads, s.share,
    )  # fmt: skip
    options = {"MIXES": mix is not None, "ADAPTIVE": adaptive, "CONJUGATE": conjugate, "MIN_NORM": MIN_NORM, **kinds}
    options |= {"BLOCK": block_of(s), "STRIPS": s.strips[0], **s.compiled, **s.solved}
    Launch(regress, s.grid, arguments, options).run()
    return mean, read, last_cross, last_gram, solution, norms, grams, crosses
