"""Triton backward pass of `dense`: the adjoint of the covariance, and the gradient of every token.

With Q the adjoint of the covariance after a token, c its gain, s its innovation variance and F = I - c k' (so that the
covariance after it is F Pb), the gradients of the token and the adjoint before it are

    w = F' dc / s,   e = Q c,   m = c'Q c,   du = w - 2 e + m k,   ds = m - dc'c / s
    dk = ds s c + Pb du,   d obs_noise = ds,   dPb = F'Q F + sym(w k') = Q + sym(du k'),   d process_noise = tr dPb

and dP = A dPb A. Over a tile this is linear in Q. With W the gains of the tile at its exit (the effect of each value on
the mean there), E = W Q and Z = E A - E W' K~ / 2 - Y,

    dP = A Q A - K~' Z - Z' K~

where Y are the contributions of the tile's own tokens. Only this is sequential. There are four launches:

1. `prepare_backward` computes W and Y of all tiles in parallel;
2. `_backward_scan` steps the adjoint from the last tile to the first and stores E; kernel "cuda" uses
   `cuda/backward.cu` instead;
3. `token_vjp` computes du of every token, and the gradients that do not need the covariance, all tiles in parallel;
4. `finish_backward` computes Pb du from the covariance stored at the entry of a chunk, all chunks in parallel.

All but the second are in `scalar_decay` or `vector_decay`. Long sequences are split in time as in `forward`: while
`_backward_scan` steps through one interval, the backward pass of `delta`, which gives the gradients of the gains, and
`prepare_backward` of the interval before it run.

The gradient of a decay needs no product of Q and P: scaling a row of the state, its key and its gain together changes
nothing. With h = diag(Q P) after a token, diag(dPb Pb) = h + (dc c + dk k + dq q) / 2. The gradient of its log-decay is
twice this minus the part of the process noise. `_backward_scan` stores h at the entry of every chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import CHUNK, MAX_PROGRAM_WIDTH, TILE
from kalmix.ops._dense.cuda import cuda_kernel
from kalmix.ops._dense.triton import scalar_decay, vector_decay
from kalmix.ops._dense.triton.forward import SavedGains
from kalmix.ops._dense.triton.primitives import (
    UNSPECIALIZED_ARGUMENTS,
    bf16_terms,
    decay_covariance,
    decay_kind,
    launch_overlapped,
    product_across_warps,
    scan_options,
    split_matmul,
    split_tiles,
    time_splits,
)
from kalmix.ops._dense.triton.rotated_belief import belief_torques
from kalmix.ops._dense.triton.wide_backward import backward_wide
from kalmix.ops._linear_memory.triton.backward import allocate_gradients
from kalmix.ops._linear_memory.triton.backward import backward as mean_backward
from kalmix.ops._linear_memory.triton.forward import ForwardResults
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import contiguous_rows, locate_sequence
from kalmix.ops._shared.widths import padded_width
from kalmix.segments import Segments


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _backward_scan(
    keys, exit_gains, tile_terms, queries, grad_var, tile_decays, saved_cov, grad_final_cov, adjoint_gains,
    adjoint_diags, adjoint_cov_diag, grad_prior, sequence_table, length, tiles, G,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, TERMS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Step the adjoint of the covariance of one sequence and head from the last tile to the first."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_tile, token, count = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    TILES_PER_CHUNK: tl.constexpr = CHUNK // TILE
    i, j, row = tl.arange(0, P), tl.arange(0, P), tl.arange(0, TILE)
    in_bounds = (i < K)[:, None] & (j < K)[None, :]
    cov_offsets = (sequence * G + head) * (K * K) + i[:, None] * K + j[None, :]
    adjoint = tl.load(grad_final_cov + cov_offsets, mask=in_bounds, other=0.0)
    adjoint_diag = tl.sum(tl.where(i[:, None] == j[None, :], adjoint, 0.0), 1)
    flat, flat_t = row[:, None] * P + j[None, :], row[None, :] * P + i[:, None]
    num_chunks = tl.cdiv(count, CHUNK)
    for reverse_index in range(num_chunks):
        chunk = num_chunks - 1 - reverse_index
        start, end = chunk * TILES_PER_CHUNK, tl.minimum((chunk + 1) * TILES_PER_CHUNK, tl.cdiv(count, TILE))
        for reverse_tile in range(end - start):
            tile_index = end - 1 - reverse_tile
            slot = (first_tile * TILES_PER_CHUNK + tile_index) * G + head
            base = slot * (TILE * P)
            exit_gain, exit_gain_t = tl.load(exit_gains + base + flat), tl.load(exit_gains + base + flat_t)
            key, key_t = tl.load(keys + base + flat), tl.load(keys + base + flat_t)
            tile_term_t = tl.load(tile_terms + base + flat_t)
            total_decay = tl.load(tile_decays + slot * P + i)
            tl.store(adjoint_diags + slot * (1 + PAIRED) * P + i, adjoint_diag)
            if PAIRED:
                adjoint_pairs = tl.sum(tl.where((i ^ 1)[:, None] == j[None, :], adjoint, 0.0), 1)
                tl.store(adjoint_diags + slot * (1 + PAIRED) * P + P + i, adjoint_pairs)
            adjoint_gain_t = split_matmul(adjoint, exit_gain_t, TERMS)
            tl.store(adjoint_gains + base + flat_t, adjoint_gain_t)
            gain_adjoint_gain = product_across_warps(exit_gain, adjoint_gain_t, TERMS, TILE, P)
            grad_cov_key_t = (
                tile_term_t
                - adjoint_gain_t * total_decay[:, None]
                + split_matmul(key_t, 0.5 * gain_adjoint_gain, TERMS)
            )
            adjoint_diag = adjoint_diag * total_decay * total_decay + 2.0 * tl.sum(key_t * grad_cov_key_t, 1)
            adjoint = decay_covariance(adjoint, tile_decays + slot * P, i, j, DECAY)
            adjoint += split_matmul(key_t, tl.trans(grad_cov_key_t), TERMS, split_matmul(grad_cov_key_t, key, TERMS))
            if VARIANCE:
                t = tile_index * TILE + row
                weight = tl.load(grad_var + (token + t) * G + head, mask=t < count, other=0.0).to(tl.float32)
                query_t = tl.load(queries + base + flat_t)
                adjoint_diag += tl.sum(query_t * query_t * weight[None, :], 1)
                adjoint += split_matmul(query_t * weight[None, :], tl.load(queries + base + flat), TERMS)
        if DECAY:
            chunk_offset = (first_tile + chunk) * G + head
            state = tl.load(saved_cov + chunk_offset * (P * P) + i[:, None] * P + j[None, :])
            diag_at = adjoint_cov_diag + chunk_offset * (1 + PAIRED) * P + i
            tl.store(diag_at, tl.sum(adjoint * state, 1))
            if PAIRED:
                state = tl.load(saved_cov + chunk_offset * (P * P) + (i ^ 1)[:, None] * P + j[None, :])
                tl.store(diag_at + P, tl.sum(adjoint * state, 1))
    tl.store(grad_prior + cov_offsets, adjoint, mask=in_bounds)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    noise_axis: Tensor | None,
    saved: SavedGains,
    results: ForwardResults,
    segments: Segments | None,
    size: int,
    grad_mean: Tensor,
    grad_var: Tensor | None,
    grad_final_mean: Tensor,
    grad_final_cov: Tensor,
    exit_torques: Tensor | None,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels of the backward pass.

    `cuda` uses `cuda/backward.cu` in place of `_backward_scan`. `exit_torques` is an output, see `belief_torques`;
    its last number of each sequence is an input.

    Returns:
        Gradients of q, k, v, obs_noise, process_noise, log_decay and noise_axis (empty if there is none), and of the
        prior mean and covariance.
    """
    (_, length, key_heads, width), heads, padded = k.shape, obs_noise.shape[2], padded_width(k.shape[3])
    (gain, rounded_gain, innovation_var, saved_cov), decay_axes, variance = (
        saved,
        decay_kind(log_decay),
        grad_var is not None,
    )
    splits, mean_inputs = time_splits(k, heads, size, decay_axes, segments), (q, k, v, rounded_gain, log_decay)
    grads = allocate_gradients(q, v, rounded_gain, log_decay, segments is not None)
    states = split_tiles(results.states, [tiles for _, tiles in splits])
    if width > MAX_PROGRAM_WIDTH:
        adjoints = torch.empty_like(results.states)  # gradients of memories at the end of tiles
        mean_grads_inputs = (results, splits[0][1], grad_mean, grad_final_mean, True, grads, adjoints)
        grad_prior_mean, signals = (
            mean_backward(*mean_inputs, *mean_grads_inputs),
            (q, k, obs_noise, process_noise, log_decay, noise_axis),
        )
        wide_grads = backward_wide(
            *signals, gain, innovation_var, saved_cov, segments, grads.gain.float(), grad_var, grad_final_cov
        )
        grad_query, grad_key, grad_obs_noise, grad_process_noise, grad_log_decay, grad_axis, *others = wide_grads
        adjoint_cov_diag, grad_final_cov = others
        if exit_torques is not None:
            belief_torques(adjoint_cov_diag, results.states, adjoints, *splits[0], length, exit_torques)
        dq, dk, dv, _, ddecay = grads.reduce(q, rounded_gain, log_decay)
        dq = dq + grad_query if variance else dq
        return (
            dq,
            dk + grad_key,
            dv,
            grad_obs_noise,
            grad_process_noise,
            ddecay + grad_log_decay,
            grad_axis,
            grad_prior_mean,
            grad_final_cov,
        )
    factory_kwargs = {"dtype": torch.float32, "device": k.device}
    grad_final_cov = ((grad_final_cov + grad_final_cov.mT) / 2).contiguous()
    grad_var_input = innovation_var if grad_var is None else grad_var.contiguous()
    process_noise, logs = process_noise.contiguous(), k if log_decay is None else log_decay.contiguous()
    q, k = contiguous_rows(q), contiguous_rows(k)
    layout = (*q.stride()[1:3], *k.stride()[1:3], heads, heads // key_heads)
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    grad_obs, grad_process = (tokens(innovation_var.shape, **factory_kwargs) for _ in range(2))
    grad_decay = tokens((0,) if log_decay is None else log_decay.shape, **factory_kwargs)
    grad_axis = tokens((0,) if noise_axis is None else noise_axis.shape, **factory_kwargs)
    terms, shape = bf16_terms(k.dtype), {"K": width, "P": padded, "TILE": TILE, "CHUNK": CHUNK, "VARIANCE": variance}
    shape |= {"PACKED": splits[0][0].packed}
    stages = vector_decay if decay_axes == 2 else scalar_decay
    options = {
        stage: stages.options(stage, decay_axes, padded, terms) | shape
        for stage in ("prepare_backward", "token_vjp", "finish_backward")
    }
    paired = {"PAIRED": noise_axis is not None}
    if decay_axes == 2:  # one decay per key
        dk = tokens(gain.shape, **factory_kwargs)
        dq = tokens(gain.shape, **factory_kwargs) if variance else dk
        options["token_vjp"] |= paired
        options["finish_backward"] |= paired
    else:
        dq, dk = grads.q, grads.k  # gradients are added to those of the mean
    scan_constants = {"DECAY": decay_axes, **scan_options(padded, bf16_terms()), **shape, **paired}
    pending, scan_kernel = [], cuda_kernel("backward") if cuda else _backward_scan
    saved_by_split = split_tiles(saved_cov, [chunks for chunks, _ in splits])
    for (cut, tiles), tile_states, saved_split in reversed(list(zip(splits, states, saved_by_split, strict=True))):
        tile_results, adjoints = results._replace(states=tile_states), torch.empty_like(tile_states)
        mean_grads_inputs = (tile_results, tiles, grad_mean, grad_final_mean, True, grads, adjoints)
        grad_final_mean = mean_backward(*mean_inputs, *mean_grads_inputs)

        def scratch(*sizes: int, num_tiles: int = cut.num_tiles * (CHUNK // TILE)) -> Tensor:
            return torch.empty(num_tiles, heads, *sizes, **factory_kwargs)

        sizes = (cut.tile_table, length, cut.tiles, *layout)
        keys, exit_gains, tile_terms, adjoint_gains = (scratch(TILE, padded) for _ in range(4))
        queries = scratch(TILE, padded) if variance else keys
        coefficients, tile_decays = scratch(3, TILE, TILE), scratch(padded)
        adjoint_diags = scratch(1 + paired["PAIRED"], padded)
        adjoint_cov_diag, grad_prior = (
            torch.empty(cut.num_tiles, heads, 1 + paired["PAIRED"], padded, **factory_kwargs),
            torch.empty(grad_final_cov.shape, **factory_kwargs),
        )
        tile_grid, chunk_grid = (len(keys) * heads,), (cut.num_tiles * heads,)
        grad_cov_keys, scaled_gains = keys, exit_gains  # later kernels reuse the memory of inputs no longer needed
        diag_flows, weighted_queries = tile_terms, queries
        prepare = Launch(stages.prepare_backward, tile_grid, (
            q, k, logs, gain, innovation_var, grads.gain, keys, exit_gains, tile_terms, queries, coefficients,
            tile_decays, *sizes,
        ), options["prepare_backward"])  # fmt: skip
        scan = Launch(scan_kernel, (cut.num_sequences, heads), (
            keys, exit_gains, tile_terms, queries, grad_var_input, tile_decays, saved_split, grad_final_cov,
            adjoint_gains, adjoint_diags, adjoint_cov_diag, grad_prior, cut.sequence_table, length, cut.tiles, heads,
        ), scan_constants)  # fmt: skip
        if decay_axes == 2:
            accumulated_noise = torch.empty_like(adjoint_diags)
            axis = process_noise if noise_axis is None else noise_axis
            steps = [Launch(stages.token_vjp, tile_grid, (
                q, k, process_noise, axis, logs, gain, innovation_var, grads.gain, grad_var_input, coefficients,
                adjoint_gains, adjoint_diags, dk, dq, grad_obs, grad_process, grad_axis, grad_cov_keys,
                weighted_queries, scaled_gains, accumulated_noise, diag_flows, *sizes,
            ), options["token_vjp"]), Launch(stages.finish_backward, chunk_grid, (
                q, k, logs, saved_split, grad_cov_keys, weighted_queries, scaled_gains, accumulated_noise, tile_decays,
                diag_flows, adjoint_cov_diag, dk, dq, grad_decay, *sizes,
            ), options["finish_backward"])]  # fmt: skip
        else:
            steps = [Launch(stages.token_vjp, tile_grid, (
                q, k, process_noise, logs, gain, innovation_var, grads.gain, grad_var_input, coefficients,
                adjoint_gains, adjoint_diags, grad_obs, grad_process, grad_decay, grad_cov_keys, *sizes,
            ), options["token_vjp"]), Launch(stages.finish_backward, chunk_grid, (
                q, k, process_noise, logs, gain, innovation_var, grad_var_input, saved_split, grad_cov_keys,
                adjoint_cov_diag, grad_obs, dk, dq, grad_decay, *sizes,
            ), options["finish_backward"])]  # fmt: skip
        pending.append(launch_overlapped(prepare, scan, steps, exclusive=len(splits) == 1))
        grad_final_cov = grad_prior
        if exit_torques is not None:  # there is one split only
            belief_torques(adjoint_cov_diag, tile_states, adjoints, cut, tiles, length, exit_torques)
    for finish in pending:
        finish()
    if decay_axes == 2:
        grads.k.add_(dk)
        if variance:
            grads.q.add_(dq)
    dq, dk, dv, _, ddecay = grads.reduce(q, rounded_gain, log_decay)
    ddecay.add_(grad_decay.to(ddecay.dtype))
    grad_obs_noise, grad_process_noise = (
        x.to(signal.dtype) for x, signal in ((grad_obs, obs_noise), (grad_process, process_noise))
    )
    return dq, dk, dv, grad_obs_noise, grad_process_noise, ddecay, grad_axis, grad_final_mean, grad_final_cov
