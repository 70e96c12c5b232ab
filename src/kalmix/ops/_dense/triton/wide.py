"""Triton forward pass of `dense` for covariances too wide for the registers of one program.

Each program holds a block of rows of the covariance in registers, in float32, and updates it token by token:

    u = Pb k,    s = r^2 + k'u,    c = u / s,    P = Pb - u u' / s,    Pb = A P A + l^2 I

Every program needs all of u, so programs exchange their parts, for two tokens at a time, since an exchange takes long.
u u' / s is rounded identically on both sides of the diagonal: with nearly certain evidence and repeated keys,
asymmetric errors grow. Process noise is accumulated separately and added to the diagonal every 64 tokens, where the
covariance is stored for the backward pass; a noise that is small relative to the prior would be rounded away at every
token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import CHUNK, padded_width
from kalmix.ops._dense.triton.primitives import UNSPECIALIZED_ARGUMENTS, decay_kind
from kalmix.ops._dense.triton.row_partition import (
    atomic_work_id,
    column_index,
    decay_rows,
    dot,
    exchange_vectors,
    load_float32,
    load_vector,
    matvec,
    outer,
    partition_options,
    row_blocks,
    sync_buffers,
    zero_columns,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import contiguous_rows, locate_sequence, tile_sequences
from kalmix.segments import Segments


@triton.jit
def _load_signals(
    k, obs_noise, process_noise, log_decay, first, t, count, i, j, k_token, G, K: tl.constexpr, DECAY: tl.constexpr
):
    """Load the signals of a token in their stored dtype; a missing token has no effect."""
    position, exists = first + t * G, t < count
    key, row_key = load_vector(k + t * k_token, j, K, exists), load_vector(k + t * k_token, i, K, exists)
    obs, noise = (
        tl.load(obs_noise + position, mask=exists, other=1.0),
        tl.load(process_noise + position, mask=exists, other=0.0),
    )
    if DECAY == 2:
        logs, row_logs = (
            load_vector(log_decay + position * K, j, K, exists),
            load_vector(log_decay + position * K, i, K, exists),
        )
    elif DECAY == 1:
        logs = tl.load(log_decay + position, mask=exists, other=0.0)
        row_logs = logs
    else:
        logs, row_logs = 0.0, 0.0
    return key, row_key, obs, noise, logs, row_logs


@triton.jit
def _signals_to_float32(signals, DECAY: tl.constexpr):
    """Convert signals to float32, and log-decays to decays."""
    key, row_key, obs, noise, logs, row_logs = signals
    if DECAY:
        decay, row_decay = tl.exp(logs.to(tl.float32)), tl.exp(row_logs.to(tl.float32))
    else:
        decay, row_decay = 1.0, 1.0
    return key.to(tl.float32), row_key.to(tl.float32), obs.to(tl.float32), noise.to(tl.float32), decay, row_decay


@triton.jit
def _decayed_matvec(state, row_decay, decay, x, DECAY: tl.constexpr):
    """Return the product of a decayed state and a vector by columns."""
    if DECAY == 2:
        products = row_decay * matvec(state, decay * x)
    elif DECAY == 1:
        products = (decay * decay) * matvec(state, x)
    else:
        products = matvec(state, x)
    return products


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _wide_forward_scan(
    q, k, obs_noise, process_noise, log_decay, states, saved_cov, gain, innovation_var, read_var, exchange,
    work_counter, sequence_table, block_stride, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, SAVE: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    """Step a block of rows of the covariance through the tokens of one sequence and head."""
    sequence, head, row_block = atomic_work_id(work_counter, G, P // ROWS)
    first_tile, token, count = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    i, j = row_block * ROWS + tl.arange(0, ROWS), column_index(P, COLUMNS)
    cov_offsets, diagonal = i[:, None, None] * P + j[None, :, :], i[:, None, None] == j[None, :, :]
    exchange += (sequence * G + head) * (4 * P)
    states += (sequence * G + head) * (P * P)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    first = token * G + head
    state = tl.load(states + cov_offsets)
    zero = zero_columns(state, i)
    pending_noise = tl.zeros([ROWS], tl.float32)  # process noise not yet added to the diagonal
    first_signals = _load_signals(k, obs_noise, process_noise, log_decay, first, 0, count, i, j, k_token, G, K, DECAY)
    second_signals = _load_signals(k, obs_noise, process_noise, log_decay, first, 1, count, i, j, k_token, G, K, DECAY)
    for t in range(0, count, 2):
        if t % CHUNK == 0:
            state += tl.where(diagonal, pending_noise[:, None, None], 0.0)
            pending_noise = tl.zeros([ROWS], tl.float32)
            if SAVE:
                tl.store(saved_cov + ((first_tile + t // CHUNK) * G + head) * (P * P) + cov_offsets, state)
        key, row_key, obs, noise, decay, row_decay = _signals_to_float32(first_signals, DECAY)
        next_key, next_row_key, next_obs, next_noise, next_decay, next_row_decay = _signals_to_float32(
            second_signals, DECAY
        )
        first_signals = _load_signals(
            k, obs_noise, process_noise, log_decay, first, t + 2, count, i, j, k_token, G, K, DECAY
        )
        second_signals = _load_signals(
            k, obs_noise, process_noise, log_decay, first, t + 3, count, i, j, k_token, G, K, DECAY
        )
        noise_first = row_decay * row_decay * pending_noise + noise
        pending_noise = next_row_decay * next_row_decay * noise_first + next_noise
        row_decay_both, decay_both = row_decay * next_row_decay, decay * next_decay

        # Multiply both keys by the covariance before the first token, then correct the second for the first.
        cov_key_rows = _decayed_matvec(state, row_decay, decay, key, DECAY) + noise_first * row_key
        next_cov_key_rows = (
            _decayed_matvec(state, row_decay_both, decay_both, next_key, DECAY) + pending_noise * next_row_key
        )
        cov_key_cols, next_cov_key_cols = exchange_vectors(
            cov_key_rows, next_cov_key_rows, zero, exchange, row_block, t // 2, P, ROWS
        )
        variance = obs + tl.maximum(dot(key, cov_key_cols), 0.0)
        inverse = 1.0 / variance
        gain_cols = cov_key_cols * inverse
        cov_key_rows, cov_key_cols = next_row_decay * cov_key_rows, next_decay * cov_key_cols
        overlap = dot(next_key, cov_key_cols) * inverse
        residual_variance = dot(next_key, next_cov_key_cols) - overlap * overlap * variance
        next_variance = next_obs + tl.maximum(residual_variance, 0.0)
        next_inverse = 1.0 / next_variance
        next_cov_key_rows -= overlap * cov_key_rows
        next_cov_key_cols -= overlap * cov_key_cols
        pair = t + tl.arange(0, 2)
        if VARIANCE:
            query, query_rows = load_float32(q + t * q_token, j, K, True), load_float32(q + t * q_token, i, K, True)
            products = query_rows * (_decayed_matvec(state, row_decay, decay, query, DECAY) + noise_first * query_rows)
            query_gain = dot(query, gain_cols)
            exists = t + 1 < count
            query, query_rows = (
                load_float32(q + (t + 1) * q_token, j, K, exists),
                load_float32(q + (t + 1) * q_token, i, K, exists),
            )
            next_products = query_rows * (
                _decayed_matvec(state, row_decay_both, decay_both, query, DECAY) + pending_noise * query_rows
            )
            overlap, next_query_gain = dot(query, cov_key_cols), dot(query, next_cov_key_cols)
            explained, next_explained = (
                query_gain * query_gain * variance,
                overlap * overlap * inverse + next_query_gain * next_query_gain * next_inverse,
            )
            pair_variances = tl.sum(tl.join(products, next_products), 0) - tl.where(
                row_block == 0, tl.join(explained, next_explained), 0.0
            )
            tl.store(read_var + row_block * block_stride + first + pair * G, pair_variances, mask=pair < count)
        state = decay_rows(state, row_decay_both, decay_both, DECAY)
        inverse_sd, next_inverse_sd = tl.rsqrt(variance), tl.rsqrt(next_variance)
        state = (
            state
            - outer(cov_key_rows * inverse_sd, cov_key_cols * inverse_sd)
            - outer(next_cov_key_rows * next_inverse_sd, next_cov_key_cols * next_inverse_sd)
        )
        dest = (first + pair * G)[None, None, :] * K + j[:, :, None]
        valid = (j < K)[:, :, None] & (pair < count)[None, None, :] & (row_block == 0)
        tl.store(gain + dest, tl.join(gain_cols, next_cov_key_cols * next_inverse), mask=valid)
        tl.store(innovation_var + first + pair * G, tl.join(variance, next_variance), mask=pair < count)
    state += tl.where(diagonal, pending_noise[:, None, None], 0.0)
    tl.store(states + cov_offsets, state)


def forward_wide(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    covariance: Tensor,
    segments: Segments | None,
    variance: bool,
    saved_cov: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward pass; return gains, read-out variances, the final covariance and innovation variances."""
    (batch, length, key_heads, width), heads = k.shape, obs_noise.shape[2]
    factory_kwargs = {"dtype": torch.float32, "device": k.device}
    q, k, logs = contiguous_rows(q), contiguous_rows(k), k if log_decay is None else log_decay.contiguous()
    cut, padded = tile_sequences(batch, length, CHUNK, segments, k), padded_width(width)
    states = torch.zeros(*covariance.shape[:2], padded, padded, **factory_kwargs)
    states[..., :width, :width] = (covariance + covariance.mT) / 2
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment are not written
    gain, innovation_var = (
        tokens(batch, length, heads, width, **factory_kwargs),
        torch.empty(batch, length, heads, **factory_kwargs),
    )
    read_var = (
        tokens(row_blocks(padded), batch, length, heads, 1, **factory_kwargs)
        if variance
        else torch.empty(1, 0, **factory_kwargs)
    )
    Launch(_wide_forward_scan, (cut.num_sequences, heads, row_blocks(padded)), (
        q, k, obs_noise.contiguous(), process_noise.contiguous(), logs, states, saved_cov, gain, innovation_var,
        read_var, *sync_buffers(states), cut.sequence_table, batch * length * heads, length, cut.tiles,
        *q.stride()[1:3], *k.stride()[1:3], heads, heads // key_heads,
    ), {
        "K": width, "CHUNK": CHUNK, "PACKED": segments is not None, "SAVE": saved_cov.numel() > 0,
        "DECAY": decay_kind(log_decay), "VARIANCE": variance, **partition_options(padded),
    }).run()  # fmt: skip
    return gain, read_var.sum(0).clamp_min_(0), states[..., :width, :width].contiguous(), innovation_var
