"""Triton forward pass of `ridge`: H and U from tile to tile, then solutions and read-outs of all tiles.

H is a memory whose values are the keys. There are two launches:

1. `forward_scan` steps from tile to tile, one program per block of columns, and stores H and U at the entry of tiles;
2. `solve_and_read` processes all tiles in parallel: the norm of H at every token, the solutions, and the read-out. The
   squared norm decays twice as fast as H, and a token adds 2 g k'H k - g^2 |k|^4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._linear_memory.triton.forward import num_boundaries, strides
from kalmix.ops._ridge.solvers import MIN_NORM
from kalmix.ops._ridge.triton.solve import (
    causal_decays,
    decay_tables,
    diagonal,
    launch_plan,
    load_block,
    load_state,
    load_token_scalars,
    locate_entry,
    program_tile,
    row_dot,
    solve,
    store_block,
    store_token_scalars,
    value_block,
)
from kalmix.ops._shared.gpu import shared_memory
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import (
    UNSPECIALIZED,
    boundary_index,
    contiguous_rows,
    load_per_token,
    load_rows,
    load_rows_transposed,
    locate_sequence,
    matmul,
    store_rows,
)


@triton.jit
def scan_columns(
    k, values, states, squares, exit_weights, tile_decays, prior, final, sequence_table, length, tiles, column_block,
    k_token, v_token, prior_n, prior_g, prior_i, prior_j, G,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, COLUMN_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr, PACKED: tl.constexpr, DECAY: tl.constexpr, WEIGHTED: tl.constexpr, STORE_SQUARES: tl.constexpr,
    NO_PRIOR: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Step through the tiles of one sequence and head with a block of columns of a memory.

    Stores the memory, and the sum of its squares if `STORE_SQUARES`, at the entry of every tile. If NO_PRIOR, the prior
    is 0 and not read, and the memory is not stored at the entry of the first tile.
    """
    DTYPE: tl.constexpr = states.dtype.element_ty
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, P), column_block * COLUMNS + tl.arange(0, COLUMNS)
    first_tile, token, tokens = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    if NO_PRIOR:
        state = tl.zeros([P, COLUMNS], tl.float32)
    else:
        state = load_state(prior + sequence * prior_n + head * prior_g, row, column, prior_i, prior_j, K, V)
    for i in tl.range(0, tl.cdiv(tokens, SIZE), num_stages=STAGES):
        count = tl.minimum(tokens - i * SIZE, SIZE)
        token_start, slot = token + i * SIZE, (first_tile + i) * G + head
        if NO_PRIOR:
            entry = boundary_index(token_start, SIZE) * G + head
            store_block(states + entry * K * V, row, column, state, K, V, i > 0)
        else:
            store_block(states + slot * K * V, row, column, state, K, V)
        if STORE_SQUARES:
            tl.store(squares + slot * COLUMN_BLOCKS + column_block, tl.sum(tl.sum(state * state, 1), 0))
        right = load_rows(values + token_start * v_token, v_token, count, column, V, SIZE)
        left = load_rows_transposed(k + token_start * k_token, k_token, count, row, K, SIZE)
        if DECAY:
            state *= tl.load(tile_decays + slot)
        if WEIGHTED:
            weighted = right.to(tl.float32) * load_token_scalars(exit_weights, slot, SIZE)[:, None]
            right = weighted.to(DTYPE)
            if right.dtype == tl.bfloat16:  # in two terms, since a solution amplifies rounding errors of H
                state = matmul(left, (weighted - right.to(tl.float32)).to(DTYPE), PRECISION, state)
        state = matmul(left, right, PRECISION, state)
    store_block(final + (sequence * G + head) * K * V, row, column, state, K, V)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_scan(
    k, v, grams, crosses, squares, exit_weights, tile_decays, gram, cross, final_gram, final_cross, sequence_table,
    length, tiles, k_token, k_head, v_token, v_head, gram_n, gram_g, gram_i, gram_j, cross_n, cross_g, cross_i, cross_j,
    G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, COLUMN_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr, PACKED: tl.constexpr, DECAY: tl.constexpr, WEIGHTED: tl.constexpr, NO_PRIOR: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Step through the tiles of one sequence and head with a block of columns of H or of U."""
    head, column_block = tl.program_id(1), tl.program_id(2)
    k += head // SHARE * k_head
    if column_block < COLUMN_BLOCKS:
        scan_columns(
            k, k, grams, squares, exit_weights, tile_decays, gram, final_gram, sequence_table, length, tiles,
            column_block, k_token, k_token, gram_n, gram_g, gram_i, gram_j, G, K, K, P, COLUMNS, COLUMN_BLOCKS, SIZE,
            PACKED, DECAY, WEIGHTED, True, NO_PRIOR, STAGES, PRECISION,
        )  # fmt: skip
    else:
        scan_columns(
            k, v + head * v_head, crosses, squares, exit_weights, tile_decays, cross, final_cross, sequence_table,
            length, tiles, column_block - COLUMN_BLOCKS, k_token, v_token, cross_n, cross_g, cross_i, cross_j, G, K, V,
            P, COLUMNS, COLUMN_BLOCKS, SIZE, PACKED, DECAY, WEIGHTED, False, NO_PRIOR, STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def tile_norms(key, gram, entry_square, decays, gain, entry_decay, PRECISION: tl.constexpr):
    """Return ||H||_F of a tile's tokens, from the keys, H at the entry and its squared norm."""
    key_products = matmul(key, tl.trans(key), PRECISION)
    key_products *= key_products
    quadratic = entry_decay * row_dot(matmul(key, gram, PRECISION), key, PRECISION)
    quadratic += tl.sum(key_products * decays * gain[None, :], 1)
    increment = gain * (2.0 * quadratic - gain * diagonal(key_products))
    square = entry_decay * entry_decay * entry_square + tl.sum(decays * decays * increment[None, :], 1)
    return tl.sqrt(tl.maximum(square, 0.0, propagate_nan=tl.PropagateNan.ALL))  # NaN on overflow


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "iterations"])
def solve_and_read(
    q, k, v, log_decays, log_decay_remainders, entry_decays, gain_values, mix, grams, crosses, squares, norms, solution,
    mean, read_variance, tile_table, length, tiles, iterations, ridge_parameter, q_token, q_head, k_token, k_head,
    v_token, v_head, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VALUE_BLOCK: tl.constexpr, COLUMN_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr, PACKED: tl.constexpr, DECAY: tl.constexpr, GAIN: tl.constexpr, MIX: tl.constexpr,
    ADAPTIVE: tl.constexpr, CONJUGATE_GRADIENT: tl.constexpr, NO_PRIOR: tl.constexpr, MIN_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute x, q'x and U'(mix x + (1 - mix) q) of a tile's tokens."""
    DTYPE: tl.constexpr = grams.dtype.element_ty
    head, token, count, row, slot = program_tile(tile_table, length, tiles, G, SIZE, PACKED)
    if count <= 0:
        return
    t, dim = tl.arange(0, SIZE), tl.arange(0, P)
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    entry, has_entry = slot, None
    if NO_PRIOR:
        entry, has_entry = locate_entry(tile_table, slot, token, G, SIZE)
    gram = load_block(grams + entry * K * K, dim, dim, K, K, has_entry)
    key = load_rows(k, k_token, count, dim, K, SIZE)
    decays, gain, entry_decay = causal_decays(
        log_decays, log_decay_remainders, entry_decays, gain_values, slot, SIZE, DECAY, GAIN
    )
    entry_square = 0.0
    for block in range(COLUMN_BLOCKS):
        if NO_PRIOR:
            entry_square += tl.load(squares + slot * COLUMN_BLOCKS + block, mask=has_entry, other=0.0)
        else:
            entry_square += tl.load(squares + slot * COLUMN_BLOCKS + block)
    norm = tile_norms(key, gram, entry_square, decays, gain, entry_decay, PRECISION)
    store_token_scalars(norms, slot, norm)
    query = load_rows(q, q_token, count, dim, K, SIZE).to(tl.float32)
    weights = decays * gain[None, :]
    x, weights = solve(
        query,
        gram,
        key,
        weights,
        entry_decay,
        norm,
        ridge_parameter,
        iterations,
        ADAPTIVE,
        CONJUGATE_GRADIENT,
        MIN_NORM,
        PRECISION,
    )
    store_rows(solution + row * K, G * K, count, dim, x, K, SIZE)
    query = load_rows(q, q_token, count, dim, K, SIZE).to(tl.float32)
    tl.store(read_variance + row + t * G, tl.sum(query * x, 1), mask=t < count)

    if MIX:
        x = query + load_per_token(mix + row, count, G, SIZE)[:, None] * (x - query)
    high = x.to(DTYPE)
    low = (x - high.to(tl.float32)).to(DTYPE)
    scores = matmul(high, tl.trans(key), PRECISION)
    if key.dtype == tl.bfloat16:  # x in two terms: for repeated keys it is large, and its products largely cancel
        scores = matmul(low, tl.trans(key), PRECISION, scores)
    scores = (scores * weights).to(DTYPE)
    for start in range(0, V, VALUE_BLOCK):
        column = start + tl.arange(0, VALUE_BLOCK)
        cross = load_block(crosses + entry * K * V, dim, column, K, V, has_entry)
        output = matmul(high, cross, PRECISION)
        if cross.dtype == tl.bfloat16:
            output = matmul(low, cross, PRECISION, output)
        value = load_rows(v + token * v_token + head * v_head, v_token, count, column, V, SIZE)
        output = matmul(scores, value, PRECISION, output * entry_decay[:, None])
        store_rows(mean + row * V, G * V, count, column, output, V, SIZE)


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
    ridge_parameter: float,
    conjugate_gradient: bool,
    iterations: int,
    size: int,
    no_prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels of the forward pass; q, k and v are bfloat16 or float32.

    If `no_prior`, sequences are packed and the prior is 0, and is not read.

    Returns:
        The mean, q'x, the final U and H; and for the backward pass x, the norms, and H and U at the entry of every tile
        (if `no_prior`, at the boundaries between tiles: see `boundary_index`).
    """
    (batch, length, _, width), (heads, values) = k.shape, v.shape[2:]
    plan = launch_plan(k, v, segments, size)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    input_kwargs, float32_kwargs = {"dtype": k.dtype, "device": k.device}, {"dtype": torch.float32, "device": k.device}
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment are not written
    mix_input, tables = k if mix is None else mix.contiguous(), decay_tables(plan, log_decay, gain, k)
    features = {"DECAY": log_decay is not None, "GAIN": gain is not None}
    num_entries = num_boundaries(v, size) if no_prior else plan.cut.num_tiles
    states = num_entries * heads * width  # stored tensors have one axis: see `tokens_per_block`
    grams, crosses = (torch.empty(states * x, **input_kwargs) for x in (width, values))
    final_gram, final_cross = (torch.empty(x.shape, **float32_kwargs) for x in (gram, cross))
    squares = torch.empty(plan.cut.num_tiles, heads, plan.column_blocks[0], **float32_kwargs)
    arguments = (
        k, v, grams, crosses, squares, tables.exit_weights, tables.tile_decays, gram, cross, final_gram, final_cross,
        plan.cut.sequence_table, length, plan.cut.tiles, *strides(k, v), *gram.stride(), *cross.stride(), heads,
        plan.group_size,
    )  # fmt: skip
    options = {"COLUMN_BLOCKS": plan.column_blocks[0], "DECAY": features["DECAY"], "WEIGHTED": any(features.values())}
    options |= {"NO_PRIOR": no_prior} | plan.scan_options | plan.constants
    Launch(forward_scan, (plan.cut.num_sequences, heads, plan.column_blocks[1]), arguments, options).run()
    solution, norms = (
        tokens(batch, length, heads, width, **input_kwargs),
        torch.empty(plan.cut.num_tiles * heads * size, **float32_kwargs),
    )
    mean, read_variance = tokens(v.shape, **input_kwargs), tokens(batch, length, heads, 1, **float32_kwargs)
    arguments = (
        q, k, v, *tables[:3], tables.weights, mix_input, grams, crosses, squares, norms, solution, mean,
        read_variance, *plan.tiles, iterations, ridge_parameter, *strides(q, k, v), heads, plan.group_size,
    )  # fmt: skip
    options = {
        "MIX": mix is not None,
        "ADAPTIVE": adaptive,
        "CONJUGATE_GRADIENT": conjugate_gradient,
        "NO_PRIOR": no_prior,
        "MIN_NORM": MIN_NORM,
        **features,
    }
    options |= {
        "VALUE_BLOCK": value_block(plan, shared_memory(k.device)),
        "COLUMN_BLOCKS": plan.column_blocks[0],
        **plan.constants,
        **plan.solve_options,
    }
    Launch(solve_and_read, plan.grid, arguments, options).run()
    return mean, read_variance, final_cross, final_gram, solution, norms, grams, crosses
