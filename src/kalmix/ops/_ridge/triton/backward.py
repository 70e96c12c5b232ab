"""Triton backward pass of `ridge`: one more solve per token, and the adjoints of H and U from tile to tile.

Let dx~ = U_t d(mean)_t be the gradient of the vector that U is read with, and y = S^{-1} dx. By Lemma 2 and equation 13
of Gated KalmaNet, the gradient of the H that token t solves with is

    dH_t = -(y_t x_t' + x_t y_t') / 2 + w_t H_t,     w_t = -a x_t'y_t / ||H_t||_F, 0 for a fixed ridge.

The adjoint of H after token s sums the later gradients with their decays, Lambda_s = sum_{t >= s} A(t, s) dH_t. The
adjoint Mu_s of U does the same with dU_t = x~_t d(mean)_t'. Then

    dk_s = g_s (2 Lambda_s k_s + Mu_s v_s),   dv_s = g_s Mu_s'k_s,   dg_s = k_s'(Lambda_s k_s + Mu_s v_s).

The gradient of a log-decay is <Lambda_t, H_t> minus the contribution of the token itself, accumulated from the end of a
tile; the part of U is a sum over pairs of tokens on both sides of the decay.

Launches, in order: `cross_backward` (Mu from tile to tile) beside `solve_adjoint` (dq, y and w of all tiles); then
`gram_backward` (Lambda) beside `value_grads` (gradients through Mu); then `key_grads`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._linear_memory.triton.forward import num_boundaries, strides
from kalmix.ops._ridge.solvers import MIN_NORM
from kalmix.ops._ridge.triton.input_grads import key_grads, value_grads
from kalmix.ops._ridge.triton.solve import (
    causal_decays,
    decay_tables,
    launch_plan,
    load_block,
    load_token_scalars,
    locate_entry,
    min_relative_ridge,
    program_tile,
    row_dot,
    solve,
    store_token_scalars,
    value_block,
)
from kalmix.ops._ridge.triton.state_backward import cross_backward, gram_backward
from kalmix.ops._shared.gpu import shared_memory
from kalmix.ops._shared.triton.compile_and_launch import Launch, launch_on_side_stream
from kalmix.ops._shared.triton.tiles import (
    UNSPECIALIZED,
    contiguous_rows,
    load_per_token,
    load_rows,
    matmul,
    store_rows,
)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "iterations"])
def solve_adjoint(
    q, k, v, log_decays, log_decay_remainders, entry_decays, gain_values, mix, grams, crosses, norms, solution,
    grad_mean, grad_variance, adjoint, grad_q, grad_mix, norm_weights, read_terms, entry_terms, tile_weights,
    entry_weights, tile_table, length, tiles, iterations, ridge_parameter, q_token, q_head, k_token, k_head, v_token,
    v_head, m_token, m_head, G, SHARE,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VALUE_BLOCK: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, DECAY: tl.constexpr, GAIN: tl.constexpr, MIX: tl.constexpr, READ_VARIANCE: tl.constexpr,
    ADAPTIVE: tl.constexpr, CONJUGATE_GRADIENT: tl.constexpr, NO_PRIOR: tl.constexpr, MIN_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, dmix, y and w of a tile's tokens.

    Also stores the parts of log-decay gradients from H_0 and U_0, and the weights of w H at the entry and on each
    token.
    """
    DTYPE: tl.constexpr = grams.dtype.element_ty
    head, token, count, row, slot = program_tile(tile_table, length, tiles, G, SIZE, PACKED)
    if count <= 0:
        return
    t, dim = tl.arange(0, SIZE), tl.arange(0, P)
    q += token * q_token + head // SHARE * q_head
    solution += row * K
    grad_q += row * K
    key = load_rows(k + token * k_token + head // SHARE * k_head, k_token, count, dim, K, SIZE)
    decays, gain, entry_decay = causal_decays(
        log_decays, log_decay_remainders, entry_decays, gain_values, slot, SIZE, DECAY, GAIN
    )
    weights = decays * gain[None, :]

    entry, has_entry = slot, None
    if NO_PRIOR:
        entry, has_entry = locate_entry(tile_table, slot, token, G, SIZE)
    grad_x, value_scores = tl.zeros([SIZE, P], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, V, VALUE_BLOCK):
        column = start + tl.arange(0, VALUE_BLOCK)
        grad = load_rows(grad_mean + token * m_token + head * m_head, m_token, count, column, V, SIZE)
        value = load_rows(v + token * v_token + head * v_head, v_token, count, column, V, SIZE)
        cross = load_block(crosses + entry * K * V, dim, column, K, V, has_entry)
        grad_x = matmul(grad, tl.trans(cross), PRECISION, grad_x)
        value_scores = matmul(grad, tl.trans(value), PRECISION, value_scores)
    grad_x *= entry_decay[:, None]
    x = load_rows(solution, G * K, count, dim, K, SIZE)
    share = tl.full([SIZE], 1.0, tl.float32)
    if MIX:
        share = load_per_token(mix + row, count, G, SIZE)
        query = load_rows(q, q_token, count, dim, K, SIZE)
    if DECAY:
        dots = row_dot(grad_x, x, PRECISION)
        if MIX:
            by_query = row_dot(grad_x, query, PRECISION)
            dots = by_query + share * (dots - by_query)
        store_token_scalars(read_terms, slot, dots)
    grad_x = matmul((value_scores * weights).to(DTYPE), key, PRECISION, grad_x)
    grad_q_rows = (1.0 - share)[:, None] * grad_x
    if MIX:
        dots = row_dot(grad_x, x, PRECISION) - row_dot(grad_x, query, PRECISION)
        tl.store(grad_mix + row + t * G, dots, mask=t < count)
        grad_x *= share[:, None]
    if READ_VARIANCE:
        dots = load_per_token(grad_variance + row, count, G, SIZE)[:, None]
        grad_x += dots * load_rows(q, q_token, count, dim, K, SIZE).to(tl.float32)
        grad_q_rows += dots * load_rows(solution, G * K, count, dim, K, SIZE).to(tl.float32)
    if MIX or READ_VARIANCE:
        store_rows(grad_q, G * K, count, dim, grad_q_rows, K, SIZE)

    norm = load_token_scalars(norms, slot, SIZE)
    gram = load_block(grams + entry * K * K, dim, dim, K, K, has_entry)
    y, weights = solve(
        grad_x,
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
    store_rows(adjoint + row * K, G * K, count, dim, y, K, SIZE)
    x = load_rows(solution, G * K, count, dim, K, SIZE)
    if DECAY:
        entry_term = row_dot(matmul(y.to(DTYPE), gram, PRECISION), x, PRECISION)
        store_token_scalars(entry_terms, slot, entry_term * entry_decay)
    if ADAPTIVE:
        norm_weight = (
            -tl.maximum(ridge_parameter, min_relative_ridge(DTYPE))
            * row_dot(y, x, PRECISION)
            / tl.where(norm > MIN_NORM, norm, 1.0)
        )
        store_token_scalars(norm_weights, slot, norm_weight)
        store_token_scalars(tile_weights, slot, tl.sum(weights * (entry_decay * norm_weight)[:, None], 0))
        tl.store(entry_weights + slot, tl.sum(entry_decay * entry_decay * norm_weight, 0))
    if MIX or READ_VARIANCE:
        tl.debug_barrier()
        y += load_rows(grad_q, G * K, count, dim, K, SIZE).to(tl.float32)
    store_rows(grad_q, G * K, count, dim, y, K, SIZE)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    solution: Tensor,
    norms: Tensor,
    grams: Tensor,
    crosses: Tensor,
    segments: Tensor | None,
    grad_mean: Tensor,
    grad_variance: Tensor | None,
    grad_cross: Tensor | None,
    grad_gram: Tensor | None,
    adaptive: bool,
    ridge_parameter: float,
    conjugate_gradient: bool,
    iterations: int,
    size: int,
    no_prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels of the backward pass.

    The gradients of the final U and H may be `None` together, which means 0, if sequences are packed. For `no_prior`
    see `forward`.

    Returns:
        Gradients of q, k, v, log_decay, gain, mix (empty for an absent signal) and of the prior U and H (empty if
        `no_prior`).
    """
    (batch, length, key_heads, width), heads = k.shape, v.shape[2]
    plan = launch_plan(k, v, segments, size)
    q, k, v, grad_mean = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), contiguous_rows(grad_mean)
    has_final = grad_gram is not None and grad_cross is not None
    input_kwargs, float32_kwargs = {"dtype": k.dtype, "device": k.device}, {"dtype": torch.float32, "device": k.device}
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    mix_input, tables = k if mix is None else mix.contiguous(), decay_tables(plan, log_decay, gain, k)
    scalar_shape, decay_options = (batch, length, heads), {"DECAY": log_decay is not None}
    gain_options, mix_options, ridge_options = (
        {"GAIN": gain is not None},
        {"MIX": mix is not None},
        {"ADAPTIVE": adaptive},
    )
    adjoint, entry_weights = (
        tokens(*scalar_shape, width, **input_kwargs),
        torch.empty(plan.cut.num_tiles, heads, **float32_kwargs),
    )
    # Gradients of value heads that share a key head are summed in float32.
    sum_dtype = k.dtype if heads == key_heads else torch.float32
    grad_q, grad_k = (tokens(*scalar_shape, width, dtype=sum_dtype, device=k.device) for _ in range(2))
    grad_v, (norm_weights, read_terms, entry_terms, tile_weights) = (
        tokens(v.shape, **input_kwargs),
        torch.empty(4, plan.cut.num_tiles, heads, size, **float32_kwargs),
    )
    grad_mix, grad_gain, grad_log_decay = (
        tokens(scalar_shape, **float32_kwargs) if x is not None else q.new_empty(0) for x in (mix, gain, log_decay)
    )
    states = (plan.cut.num_tiles if has_final else num_boundaries(v, size)) * heads * width
    gram_adjoints, cross_adjoints = (torch.empty(states * x, **input_kwargs) for x in (width, v.shape[3]))
    prior_shapes = [(plan.cut.num_sequences, heads, width, x) for x in (width, v.shape[3])]
    grad_gram_prior, grad_cross_prior = (torch.empty((0,) if no_prior else x, **float32_kwargs) for x in prior_shapes)
    if grad_gram is None or grad_cross is None:
        grad_gram = grad_cross = torch.empty(0, 1, 1, 1, **float32_kwargs)  # is not read
    else:
        grad_gram = (grad_gram + grad_gram.mT) / 2
    edges = {"NO_PRIOR": no_prior, "FINAL": has_final}

    arguments = (
        q, mix_input, solution, grad_mean, tables.entry_decays, tables.tile_decays, cross_adjoints, grad_cross,
        grad_cross_prior, plan.cut.sequence_table, length, plan.cut.tiles, *strides(q, grad_mean),
        *grad_cross.stride(), heads, plan.group_size,
    )  # fmt: skip
    num_blocks, options = (
        plan.column_blocks[1] - plan.column_blocks[0],
        decay_options | mix_options | edges | plan.scan_options | plan.constants,
    )
    wait = launch_on_side_stream(
        Launch(cross_backward, (plan.cut.num_sequences, heads, num_blocks), arguments, options)
    )
    arguments = (
        q, k, v, *tables[:3], tables.weights, mix_input, grams, crosses, norms, solution, grad_mean,
        k if grad_variance is None else grad_variance.contiguous(), adjoint, grad_q, grad_mix, norm_weights, read_terms,
        entry_terms, tile_weights, entry_weights, *plan.tiles, iterations, ridge_parameter,
        *strides(q, k, v, grad_mean), heads, plan.group_size,
    )  # fmt: skip
    options = decay_options | gain_options | mix_options | ridge_options | plan.constants | plan.solve_options
    options |= {
        "VALUE_BLOCK": value_block(plan, shared_memory(k.device)),
        "READ_VARIANCE": grad_variance is not None,
        "CONJUGATE_GRADIENT": conjugate_gradient,
        "NO_PRIOR": no_prior,
        "MIN_NORM": MIN_NORM,
    }
    Launch(solve_adjoint, plan.grid, arguments, options).run()
    wait()

    arguments = (
        k, grams, solution, adjoint, tables.entry_decays, tables.tile_decays, tile_weights, entry_weights,
        gram_adjoints, grad_gram, grad_gram_prior, plan.cut.sequence_table, length, plan.cut.tiles, *strides(k),
        *grad_gram.stride(), heads, plan.group_size,
    )  # fmt: skip
    options = decay_options | ridge_options | edges | plan.scan_options | {"STAGES": 1} | plan.constants
    wait = launch_on_side_stream(
        Launch(gram_backward, (plan.cut.num_sequences, heads, plan.column_blocks[0]), arguments, options)
    )
    arguments = (
        q, k, v, *tables[:2], tables.tile_decays, tables.weights, mix_input, crosses, solution, grad_mean,
        read_terms, cross_adjoints, grad_k, grad_v, grad_gain, grad_log_decay, *plan.tiles,
        *strides(q, k, v, grad_mean), heads, plan.group_size,
    )  # fmt: skip
    grad_options = edges | plan.constants | plan.solve_options | {"num_warps": 4, "VALUE_BLOCK": 64}
    Launch(value_grads, plan.grid, arguments, decay_options | gain_options | mix_options | grad_options).run()
    wait()
    arguments = (
        k, *tables[:3], tables.tile_decays, tables.weights, grams, norms, solution, adjoint, norm_weights,
        entry_terms, gram_adjoints, grad_k, grad_gain, grad_log_decay, *plan.tiles, *strides(k), heads, plan.group_size,
    )  # fmt: skip
    Launch(key_grads, plan.grid, arguments, decay_options | gain_options | ridge_options | grad_options).run()

    if heads != key_heads:
        grad_q, grad_k = (x.unflatten(2, (key_heads, -1)).sum(3).to(k.dtype) for x in (grad_q, grad_k))
    scalar_grads = zip((grad_log_decay, grad_gain, grad_mix), (log_decay, gain, mix), strict=True)
    grad_log_decay, grad_gain, grad_mix = (x if like is None else x.to(like.dtype) for x, like in scalar_grads)
    return grad_q, grad_k, grad_v, grad_log_decay, grad_gain, grad_mix, grad_cross_prior, grad_gram_prior
