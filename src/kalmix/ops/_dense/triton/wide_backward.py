"""Triton backward pass of `dense` for covariances too wide for the registers of one program.

Each program holds a block of rows of the adjoint.

Q is the adjoint of the covariance after a token, c its gain, s its innovation variance and A its decays, as in
`backward`. There are two launches:

1. `_wide_backward_scan` steps the adjoint token by token: ds = c'Q c - dc'c / s, du = dc / s - 2 Q c + ds k, and the
   adjoint before the token is A (Q + sym(du k')) A. Programs that share an adjoint exchange Q c.
2. `_wide_signal_grads` computes dk = ds s c + Pb du, stepping the covariance through a chunk from its stored value, all
   chunks and row blocks in parallel. Gradients of noises and decays follow from the diagonal of dPb at every token.

Signals are prefetched some tokens ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import CHUNK, PREFETCH
from kalmix.ops._dense.triton.primitives import (
    UNSPECIALIZED_ARGUMENTS,
    decay_kind,
    load_noise_blocks,
    reduce_to_inputs,
)
from kalmix.ops._dense.triton.row_partition import (
    atomic_work_id,
    column_index,
    decay_rows,
    dot,
    exchange_vectors,
    load_float32,
    matvec,
    outer,
    partition_options,
    row_blocks,
    sync_buffers,
    zero_columns,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import contiguous_rows, locate_sequence, locate_tile, tile_sequences
from kalmix.ops._shared.widths import padded_width
from kalmix.segments import Segments


@triton.jit
def _load_decays(log_decay, position, i, j, K: tl.constexpr, DECAY: tl.constexpr):
    """Load the decays of a token, by rows and by columns."""
    if DECAY == 2:
        row_decay, decay = (
            tl.exp(load_float32(log_decay + position * K, i, K, True)),
            tl.exp(load_float32(log_decay + position * K, j, K, True)),
        )
    elif DECAY == 1:
        decay = tl.exp(tl.load(log_decay + position).to(tl.float32))
        row_decay = decay
    else:
        row_decay, decay = 1.0, 1.0
    return row_decay, decay


@triton.jit
def _prefetch(x, stride, t, count, K: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr):
    """Load one number of every 32 bytes of the vectors of some tokens, to bring them to the cache."""
    row, dim = t + tl.arange(0, TOKENS)[:, None], tl.arange(0, P // 8)[None, :] * 8
    return tl.load(x + row.to(tl.int64) * stride + dim, mask=(row >= 0) & (row < count) & (dim < K), other=0.0)


@triton.jit
def _prefetch_signals(
    x,
    y,
    log_decay,
    position,
    t,
    count,
    G,
    K: tl.constexpr,
    P: tl.constexpr,
    PREFETCH: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Prefetch two scalars per token, and decays."""
    x_values, y_values = (
        _prefetch(x + position, G, t, count, 1, 8, PREFETCH),
        _prefetch(y + position, G, t, count, 1, 8, PREFETCH),
    )
    if DECAY == 2:
        logs = _prefetch(log_decay + position * K, G * K, t, count, K, P, PREFETCH)
    elif DECAY == 1:
        logs = _prefetch(log_decay + position, G, t, count, 1, 8, PREFETCH)
    else:
        logs = y_values
    return x_values, y_values, logs


@triton.jit
def _wait_for_prefetch(sink, prefetched, count):
    """Wait for prefetched numbers: store them under a mask that is never true, unknown to the compiler."""
    for n in tl.static_range(len(prefetched)):
        x = prefetched[n]
        tl.store(sink + tl.zeros(x.shape, tl.int32), x.to(sink.dtype.element_ty), mask=count < 0)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _wide_backward_scan(
    q, k, log_decay, gain, innovation_var, grad_gain, grad_var, saved_cov, adjoints, grad_cov_keys, grad_obs, end_diags,
    adjoint_cov_diag, exchange, work_counter, sequence_table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PREFETCH: tl.constexpr,
    CHUNK: tl.constexpr, PACKED: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Step a block of rows of the adjoint through the tokens of one sequence and head, from the last."""
    sequence, head, row_block = atomic_work_id(work_counter, G, P // ROWS)
    first_tile, token, count = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    i, j = row_block * ROWS + tl.arange(0, ROWS), column_index(P, COLUMNS)
    cov_offsets, diagonal = i[:, None, None] * P + j[None, :, :], i[:, None, None] == j[None, :, :]
    exchange += (sequence * G + head) * (4 * P)
    adjoints += (sequence * G + head) * (P * P)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    first = token * G + head
    adjoint = tl.load(adjoints + cov_offsets)
    zero = zero_columns(adjoint, i)
    prefetch_from = (count - 1) // PREFETCH * PREFETCH
    prefetched_signals = _prefetch_signals(
        innovation_var, innovation_var, log_decay, first, prefetch_from, count, G, K, P, PREFETCH, DECAY
    )
    prefetched_vectors = _prefetch_vectors(k, gain, grad_gain, first, prefetch_from, count, k_token, G, K, P, PREFETCH)
    for reverse_index in range(count):
        t = count - 1 - reverse_index
        position = first + t * G
        if (t % PREFETCH == PREFETCH - 1) | (reverse_index == 0):
            _wait_for_prefetch(innovation_var, prefetched_signals, count)
            _wait_for_prefetch(innovation_var, prefetched_vectors, count)
            prefetch_from = t // PREFETCH * PREFETCH - PREFETCH
            prefetched_signals = _prefetch_signals(
                innovation_var, innovation_var, log_decay, first, prefetch_from, count, G, K, P, PREFETCH, DECAY
            )
            prefetched_vectors = _prefetch_vectors(
                k, gain, grad_gain, first, prefetch_from, count, k_token, G, K, P, PREFETCH
            )
        if (t % CHUNK == CHUNK - 1) | (reverse_index == 0):
            end_diag = tl.sum(tl.sum(tl.where(diagonal, adjoint, 0.0), 1), 1)
            end_at = end_diags + ((first_tile + t // CHUNK) * G + head) * ((1 + PAIRED) * P) + i
            tl.store(end_at, end_diag)
            if PAIRED:
                partners = (i ^ 1)[:, None, None] == j[None, :, :]
                tl.store(end_at + P, tl.sum(tl.sum(tl.where(partners, adjoint, 0.0), 1), 1))
        key, row_key = load_float32(k + t * k_token, j, K, True), load_float32(k + t * k_token, i, K, True)
        gain_cols = load_float32(gain + position * K, j, K, True)
        inverse = 1.0 / tl.load(innovation_var + position)
        grad_gain_cols = inverse * load_float32(grad_gain + position * K, j, K, True)
        grad_gain_rows = inverse * load_float32(grad_gain + position * K, i, K, True)
        row_decay, decay = _load_decays(log_decay, position, i, j, K, DECAY)
        if VARIANCE:
            weighted_query_rows = tl.load(grad_var + position).to(tl.float32) * load_float32(
                q + t * q_token, i, K, True
            )
            adjoint += outer(weighted_query_rows, load_float32(q + t * q_token, j, K, True))
        adjoint_gain_rows = matvec(adjoint, gain_cols)
        adjoint_gain_cols, _ = exchange_vectors(
            adjoint_gain_rows, adjoint_gain_rows, zero, exchange, row_block, reverse_index, P, ROWS
        )
        grad_obs_value = dot(gain_cols, adjoint_gain_cols - grad_gain_cols)
        grad_cov_key_cols, grad_cov_key_rows = (
            grad_gain_cols + grad_obs_value * key - 2.0 * adjoint_gain_cols,
            grad_gain_rows + grad_obs_value * row_key - 2.0 * adjoint_gain_rows,
        )
        tl.store(grad_cov_keys + position * K + i, grad_cov_key_rows, mask=i < K)
        tl.store(grad_obs + position, grad_obs_value)
        adjoint = adjoint + outer(0.5 * grad_cov_key_rows, key) + outer(row_key, 0.5 * grad_cov_key_cols)
        adjoint = decay_rows(adjoint, row_decay, decay, DECAY)
        if DECAY and t % CHUNK == 0:
            chunk_offset = (first_tile + t // CHUNK) * G + head
            state = tl.load(saved_cov + chunk_offset * (P * P) + cov_offsets)
            diag_at = adjoint_cov_diag + chunk_offset * ((1 + PAIRED) * P) + i
            tl.store(diag_at, tl.sum(tl.sum(adjoint * state, 1), 1))
            if PAIRED:
                partner_offsets = (i ^ 1)[:, None, None] * P + j[None, :, :]
                state = tl.load(saved_cov + chunk_offset * (P * P) + partner_offsets)
                tl.store(diag_at + P, tl.sum(tl.sum(adjoint * state, 1), 1))
    tl.store(adjoints + cov_offsets, adjoint)


@triton.jit
def _prefetch_vectors(
    k, gain, grad_gain, position, t, count, k_token, G, K: tl.constexpr, P: tl.constexpr, PREFETCH: tl.constexpr
):
    """Prefetch the keys, gains and gradients of gains of some tokens."""
    gains = _prefetch(gain + position * K, G * K, t, count, K, P, PREFETCH)
    grads = _prefetch(grad_gain + position * K, G * K, t, count, K, P, PREFETCH)
    return _prefetch(k, k_token, t, count, K, P, PREFETCH), gains, grads


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _wide_signal_grads(
    q, k, process_noise, noise_axis, log_decay, gain, innovation_var, grad_gain, grad_var, saved_cov, grad_cov_keys,
    grad_obs, end_diags, adjoint_cov_diag, dk, dq, grad_process, grad_axis, grad_decay, tile_table, block_stride,
    length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PREFETCH: tl.constexpr,
    CHUNK: tl.constexpr, PACKED: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's signals for a block of rows."""
    chunk, head, row_block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    token, count = locate_tile(tile_table, chunk, length, tiles, CHUNK, PACKED)
    if count <= 0:
        return
    i, j = row_block * ROWS + tl.arange(0, ROWS), column_index(P, COLUMNS)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    chunk_offset, first = chunk * G + head, token * G + head
    prefetched_signals = _prefetch_signals(
        process_noise, innovation_var, log_decay, first, 0, count, G, K, P, CHUNK, DECAY
    )
    prefetched_grads = _prefetch(grad_cov_keys + first * K, G * K, 0, count, K, P, CHUNK)
    prefetched_gains = _prefetch(gain + first * K, G * K, 0, count, K, P, CHUNK)
    state = tl.load(saved_cov + chunk_offset * (P * P) + i[:, None, None] * P + j[None, :, :])
    pending_noise = tl.zeros([ROWS], tl.float32)
    pending_pair_noise = tl.zeros([ROWS], tl.float32)
    _wait_for_prefetch(innovation_var, (prefetched_grads, prefetched_gains), count)
    _wait_for_prefetch(innovation_var, prefetched_signals, count)
    for t in range(count):
        position = first + t * G
        grad_cov_key_cols, grad_cov_key_rows = (
            load_float32(grad_cov_keys + position * K, j, K, True),
            load_float32(grad_cov_keys + position * K, i, K, True),
        )
        gain_cols, gain_rows = (
            load_float32(gain + position * K, j, K, True),
            load_float32(gain + position * K, i, K, True),
        )
        variance = tl.load(innovation_var + position)
        row_decay, decay = _load_decays(log_decay, position, i, j, K, DECAY)
        noise, pair_noise = load_noise_blocks(process_noise, noise_axis, position, i, K, PAIRED)
        pending_noise = row_decay * row_decay * pending_noise + noise
        state = decay_rows(state, row_decay, decay, DECAY)
        grad_key_rows = (
            matvec(state, grad_cov_key_cols)
            + pending_noise * grad_cov_key_rows
            + tl.load(grad_obs + position) * variance * gain_rows
        )
        if PAIRED:
            pending_pair_noise = row_decay * row_decay * pending_pair_noise + pair_noise
            grad_key_rows += pending_pair_noise * load_float32(grad_cov_keys + position * K, i ^ 1, K, True)
        tl.store(dk + position * K + i, grad_key_rows, mask=i < K)
        sd = tl.sqrt(variance)
        state -= outer(gain_rows * sd, gain_cols * sd)
        if VARIANCE:
            cov_query = matvec(state, load_float32(q + t * q_token, j, K, True)) + pending_noise * load_float32(
                q + t * q_token, i, K, True
            )
            if PAIRED:
                cov_query += pending_pair_noise * load_float32(q + t * q_token, i ^ 1, K, True)
            tl.store(dq + position * K + i, 2.0 * tl.load(grad_var + position).to(tl.float32) * cov_query, mask=i < K)

    t = tl.arange(0, CHUNK)
    position, valid = first + t * G, t < count
    key_offsets, key_mask = position[:, None] * K + i[None, :], valid[:, None] & (i < K)[None, :]
    key = tl.load(k + t[:, None] * k_token + i[None, :], mask=key_mask, other=0.0).to(tl.float32)
    # contributions of each token to the diagonal of dPb
    diag_terms = tl.load(grad_cov_keys + key_offsets, mask=key_mask, other=0.0) * key
    if VARIANCE:
        query = tl.load(q + t[:, None] * q_token + i[None, :], mask=key_mask, other=0.0).to(tl.float32)
        weighted_query = tl.load(grad_var + position, mask=valid, other=0.0).to(tl.float32)[:, None] * query
        diag_terms += weighted_query * query
    end_diags += chunk_offset * ((1 + PAIRED) * P) + i
    diag_terms += tl.where((t == count - 1)[:, None], tl.load(end_diags)[None, :], 0.0)
    has_next = t + 1 < count
    noise = tl.load(process_noise + position, mask=valid, other=0.0).to(tl.float32)
    if DECAY == 2:
        logs = tl.load(log_decay + key_offsets + G * K, mask=key_mask & has_next[:, None], other=0.0).to(tl.float32)
        adjoint_diag = tl.associative_scan((tl.exp(2.0 * logs), diag_terms), 0, _combine_decayed, reverse=True)[1]
        if PAIRED:
            partner_key, partner_grad = (
                tl.load(k + t[:, None] * k_token + (i ^ 1)[None, :], mask=key_mask, other=0.0).to(tl.float32),
                tl.load(grad_cov_keys + position[:, None] * K + (i ^ 1)[None, :], mask=key_mask, other=0.0),
            )
            pair_terms = 0.5 * (tl.load(grad_cov_keys + key_offsets, mask=key_mask, other=0.0) * partner_key)
            pair_terms += 0.5 * (partner_grad * key)
            if VARIANCE:
                pair_terms += weighted_query * tl.load(
                    q + t[:, None] * q_token + (i ^ 1)[None, :], mask=key_mask, other=0.0
                ).to(tl.float32)
            pair_terms += tl.where((t == count - 1)[:, None], tl.load(end_diags + P)[None, :], 0.0)
            adjoint_pairs = tl.associative_scan((tl.exp(2.0 * logs), pair_terms), 0, _combine_decayed, reverse=True)[1]
            axis, partner_axis = (
                tl.load(noise_axis + key_offsets, mask=key_mask, other=0.0),
                tl.load(noise_axis + position[:, None] * K + (i ^ 1)[None, :], mask=key_mask, other=0.0),
            )
            adjoint_axis = adjoint_diag * axis + adjoint_pairs * partner_axis
            tl.store(grad_axis + key_offsets, 2.0 * noise[:, None] * adjoint_axis, mask=key_mask)
            adjoint_diag = axis * adjoint_axis  # of the noise
        trace = tl.sum(adjoint_diag, 1)
    elif DECAY == 1:
        logs = tl.load(log_decay + position + G, mask=has_next, other=0.0).to(tl.float32)
        trace = tl.associative_scan((tl.exp(2.0 * logs), tl.sum(diag_terms, 1)), 0, _combine_decayed, reverse=True)[1]
    else:
        trace = tl.cumsum(tl.sum(diag_terms, 1), 0, reverse=True)
    tl.store(grad_process + row_block * block_stride + position, trace, mask=valid)
    if DECAY:
        tl.debug_barrier()  # other threads load these stores
        token_terms = tl.load(grad_gain + key_offsets, mask=key_mask, other=0.0) * tl.load(
            gain + key_offsets, mask=key_mask, other=0.0
        )
        token_terms += tl.load(dk + key_offsets, mask=key_mask, other=0.0) * key
        if VARIANCE:
            token_terms += tl.load(dq + key_offsets, mask=key_mask, other=0.0) * query
        diag_flow = tl.load(adjoint_cov_diag + chunk_offset * ((1 + PAIRED) * P) + i)
        if DECAY == 2:
            diag_change = noise[:, None] * adjoint_diag - 0.5 * token_terms
            grad = 2.0 * (diag_flow[None, :] + tl.cumsum(diag_change, 0) - diag_change)
            tl.store(grad_decay + key_offsets, grad, mask=key_mask)
        else:
            diag_change = noise * trace - 0.5 * tl.sum(token_terms, 1)
            grad = 2.0 * (tl.sum(diag_flow, 0) + tl.cumsum(diag_change, 0) - diag_change)
            tl.store(grad_decay + row_block * block_stride + position, grad, mask=valid)


@triton.jit
def _combine_decayed(later_decay, later, decay, earlier):
    """Combine two intervals of a decaying sum that runs backward in time."""
    return later_decay * decay, decay * later + earlier


def backward_wide(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    noise_axis: Tensor | None,
    gain: Tensor,
    innovation_var: Tensor,
    saved_cov: Tensor,
    segments: Segments | None,
    grad_gain: Tensor,
    grad_var: Tensor | None,
    grad_final_cov: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward pass; return gradients of the signals and of the prior covariance.

    The last but one result is the diagonal of adjoint times covariance at the start of chunks, `[chunks, G, 1, P]`;
    with `noise_axis`, `[chunks, G, 2, P]` with the entries of partners.
    """
    (batch, length, key_heads, width), heads = k.shape, obs_noise.shape[2]
    factory_kwargs = {"dtype": torch.float32, "device": k.device}
    dtypes = [x.dtype for x in (q, k, obs_noise, process_noise, k if log_decay is None else log_decay)]
    q, k, logs = contiguous_rows(q), contiguous_rows(k), k if log_decay is None else log_decay.contiguous()
    grad_gain, process_noise = grad_gain.contiguous(), process_noise.contiguous()
    variance, grad_var_input = grad_var is not None, innovation_var if grad_var is None else grad_var.contiguous()
    cut, padded = tile_sequences(batch, length, CHUNK, segments, k), padded_width(width)
    adjoints = torch.zeros(*grad_final_cov.shape[:2], padded, padded, **factory_kwargs)
    adjoints[..., :width, :width] = (grad_final_cov + grad_final_cov.mT) / 2
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    grad_cov_keys, end_diags, adjoint_cov_diag = (
        torch.empty_like(gain),
        *(torch.empty(cut.num_tiles, heads, 1 + (noise_axis is not None), padded, **factory_kwargs) for _ in range(2)),
    )
    dk = tokens(gain.shape, **factory_kwargs)
    dq = tokens(gain.shape, **factory_kwargs) if variance else dk
    num_row_blocks = row_blocks(padded)
    grad_obs, grad_process = (
        tokens(innovation_var.shape, **factory_kwargs),
        tokens(num_row_blocks, *innovation_var.shape, **factory_kwargs),
    )
    grad_axis = tokens((0,) if noise_axis is None else noise_axis.shape, **factory_kwargs)
    grad_decay = torch.empty(1, 0, **factory_kwargs)
    if log_decay is not None:  # gradients of decays per head are summed over row blocks
        grad_decay = tokens(num_row_blocks if log_decay.ndim == 3 else 1, *log_decay.shape, **factory_kwargs)
    options = {
        "K": width,
        "PREFETCH": PREFETCH,
        "CHUNK": CHUNK,
        "PACKED": segments is not None,
        **partition_options(padded),
    }
    options |= {"DECAY": decay_kind(log_decay), "VARIANCE": variance, "PAIRED": noise_axis is not None}
    sizes = (length, cut.tiles, *q.stride()[1:3], *k.stride()[1:3], heads, heads // key_heads)
    Launch(_wide_backward_scan, (cut.num_sequences, heads, num_row_blocks), (
        q, k, logs, gain, innovation_var, grad_gain, grad_var_input, saved_cov, adjoints, grad_cov_keys, grad_obs,
        end_diags, adjoint_cov_diag, *sync_buffers(adjoints), cut.sequence_table, *sizes,
    ), options).run()  # fmt: skip
    Launch(_wide_signal_grads, (cut.num_tiles, heads, num_row_blocks), (
        q, k, process_noise, process_noise if noise_axis is None else noise_axis, logs, gain, innovation_var, grad_gain,
        grad_var_input, saved_cov, grad_cov_keys, grad_obs, end_diags, adjoint_cov_diag, dk, dq, grad_process,
        grad_axis, grad_decay, cut.tile_table, innovation_var.numel(), *sizes,
    ), options).run()  # fmt: skip
    grads = (dq if variance else None, dk, grad_obs, grad_process.sum(0), grad_decay.sum(0))
    signal_grads = reduce_to_inputs(grads, dtypes, key_heads)
    return *signal_grads, grad_axis, adjoint_cov_diag, adjoints[..., :width, :width].contiguous()
