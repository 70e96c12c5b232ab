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

from kalmix.ops._dense.block_sizes import CHUNK
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
from kalmix.ops._shared.widths import padded_width
from kalmix.segments import Segments


@triton.jit
def _load_signals(
    k, obs_noise, process_noise, noise_axis, log_decay, first, t, count, i, j, k_token, G, K: tl.constexpr,
    DECAY: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
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
    if PAIRED:
        axis = load_vector(noise_axis + position * K, i, K, exists)
        pair = axis, load_vector(noise_axis + position * K, i ^ 1, K, exists)
        pair += (load_vector(k + t * k_token, i ^ 1, K, exists),)
    else:
        pair = 1.0, 0.0, 0.0
    return key, row_key, obs, noise, logs, row_logs, pair


@triton.jit
def _signals_to_float32(signals, DECAY: tl.constexpr, PAIRED: tl.constexpr):
    """Convert signals to float32, log-decays to decays, and noises to blocks of pairs, with the partner's key."""
    key, row_key, obs, noise, logs, row_logs, pair = signals
    if DECAY:
        decay, row_decay = tl.exp(logs.to(tl.float32)), tl.exp(row_logs.to(tl.float32))
    else:
        decay, row_decay = 1.0, 1.0
    noise = noise.to(tl.float32)
    if PAIRED:
        axis, partner_axis, partner_key = pair
        noises = noise * (axis * axis), noise * (axis * partner_axis), partner_key.to(tl.float32)
    else:
        noises = noise, noise, row_key.to(tl.float32)
    return key.to(tl.float32), row_key.to(tl.float32), obs.to(tl.float32), noises, decay, row_decay


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
    q, k, obs_noise, process_noise, noise_axis, log_decay, states, saved_cov, gain, innovation_var, read_var, exchange,
    work_counter, sequence_table, block_stride, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, SAVE: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Step a block of rows of the covariance through the tokens of one sequence and head."""
    sequence, head, row_block = atomic_work_id(work_counter, G, P // ROWS)
    first_tile, token, count = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    i, j = row_block * ROWS + tl.arange(0, ROWS), column_index(P, COLUMNS)
    cov_offsets, diagonal = i[:, None, None] * P + j[None, :, :], i[:, None, None] == j[None, :, :]
    partners = (i ^ 1)[:, None, None] == j[None, :, :]
    exchange += (sequence * G + head) * (4 * P)
    states += (sequence * G + head) * (P * P)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    first = token * G + head
    state = tl.load(states + cov_offsets)
    zero = zero_columns(state, i)
    pending_noise = tl.zeros([ROWS], tl.float32)  # process noise not yet added to the covariance
    pending_pair_noise = tl.zeros([ROWS], tl.float32)  # of a key with its partner
    first_signals = _load_signals(
        k, obs_noise, process_noise, noise_axis, log_decay, first, 0, count, i, j, k_token, G, K, DECAY, PAIRED
    )
    second_signals = _load_signals(
        k, obs_noise, process_noise, noise_axis, log_decay, first, 1, count, i, j, k_token, G, K, DECAY, PAIRED
    )
    for t in range(0, count, 2):
        if t % CHUNK == 0:
            state += tl.where(diagonal, pending_noise[:, None, None], 0.0)
            pending_noise = tl.zeros([ROWS], tl.float32)
            if PAIRED:
                state += tl.where(partners, pending_pair_noise[:, None, None], 0.0)
                pending_pair_noise = tl.zeros([ROWS], tl.float32)
            if SAVE:
                tl.store(saved_cov + ((first_tile + t // CHUNK) * G + head) * (P * P) + cov_offsets, state)
        key, row_key, obs, noise, decay, row_decay = _signals_to_float32(first_signals, DECAY, PAIRED)
        next_key, next_row_key, next_obs, next_noise, next_decay, next_row_decay = _signals_to_float32(
            second_signals, DECAY, PAIRED
        )
        first_signals = _load_signals(
            k, obs_noise, process_noise, noise_axis, log_decay, first, t + 2, count, i, j, k_token, G, K, DECAY, PAIRED
        )
        second_signals = _load_signals(
            k, obs_noise, process_noise, noise_axis, log_decay, first, t + 3, count, i, j, k_token, G, K, DECAY, PAIRED
        )
        noise, pair_noise, partner_key = noise
        next_noise, next_pair_noise, next_partner_key = next_noise
        noise_first = row_decay * row_decay * pending_noise + noise
        pending_noise = next_row_decay * next_row_decay * noise_first + next_noise
        row_decay_both, decay_both = row_decay * next_row_decay, decay * next_decay

        # Multiply both keys by the covariance before the first token, then correct the second for the first.
        cov_key_rows = _decayed_matvec(state, row_decay, decay, key, DECAY) + noise_first * row_key
        next_cov_key_rows = (
            _decayed_matvec(state, row_decay_both, decay_both, next_key, DECAY) + pending_noise * next_row_key
        )
        if PAIRED:
            pair_noise_first = row_decay * row_decay * pending_pair_noise + pair_noise
            pending_pair_noise = next_row_decay * next_row_decay * pair_noise_first + next_pair_noise
            cov_key_rows += pair_noise_first * partner_key
            next_cov_key_rows += pending_pair_noise * next_partner_key
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
            if PAIRED:
                products += query_rows * pair_noise_first * load_float32(q + t * q_token, i ^ 1, K, True)
            query_gain = dot(query, gain_cols)
            exists = t + 1 < count
            query, query_rows = (
                load_float32(q + (t + 1) * q_token, j, K, exists),
                load_float32(q + (t + 1) * q_token, i, K, exists),
            )
            next_products = query_rows * (
                _decayed_matvec(state, row_decay_both, decay_both, query, DECAY) + pending_noise * query_rows
            )
            if PAIRED:
                partner_rows = load_float32(q + (t + 1) * q_token, i ^ 1, K, exists)
                next_products += query_rows * pending_pair_noise * partner_rows
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
    if PAIRED:
        state += tl.where(partners, pending_pair_noise[:, None, None], 0.0)
    tl.store(states + cov_offsets, state)


def forward_wide(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    noise_axis: Tensor | None,
    covariance: Tensor,
    segments: Segments | None,
    variance: bool,
    saved_cov: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward pass; return gains, read-out variances, the final covariance and innovation variances."""
    (batch, length, key_heads, width), heads = k.shape, obs_noise.shape[2]
    factory_kwargs = {"dtype": torch.float32, "device": k.device}
    q, k, logs = contiguous_rows(q), contiguous_rows(k), k if log_decay is None else log_decay.contiguous()
    process_noise = process_noise.contiguous()
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
    noise_axis_input = process_noise if noise_axis is None else noise_axis
    Launch(_wide_forward_scan, (cut.num_sequences, heads, row_blocks(padded)), (
        q, k, obs_noise.contiguous(), process_noise, noise_axis_input, logs, states, saved_cov, gain, innovation_var,
        read_var, *sync_buffers(states), cut.sequence_table, batch * length * heads, length, cut.tiles,
        *q.stride()[1:3], *k.stride()[1:3], heads, heads // key_heads,
    ), {
        "K": width, "CHUNK": CHUNK, "PACKED": segments is not None, "SAVE": saved_cov.numel() > 0,
        "DECAY": decay_kind(log_decay), "PAIRED": noise_axis is not None, "VARIANCE": variance,
        **partition_options(padded),
    }).run()  # fmt: skip
    return gain, read_var.sum(0).clamp_min_(0), states[..., :width, :width].contiguous(), innovation_var
