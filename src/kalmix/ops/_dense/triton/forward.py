"""Triton forward pass of `dense`: gains, read-out variances and the final covariance, then means by `delta`.

The covariance does not depend on the values. It steps through time in tiles of 16 tokens. With P the covariance at the
entry of a tile, A(t, s) the decay from token s to token t and N_t the process noise accumulated since the entry,

    C[t, s] = k~_t' P k~_s + k_t' A(t, s) N_s k_s + [t = s] r_t^2      innovation covariance, k~_t = A(t, entry) k_t
    G[s]    = A(exit, entry) P k~_s + A(exit, s) N_s k_s
    P'      = A P A + N - X' X,    X = L^-1 G,    C = L L'

Only P k~ and its consequences are sequential. There are three launches:

1. `prepare` computes the noises and decays of all tiles in parallel;
2. `_forward_scan` steps the covariance from tile to tile and stores P k~ of every token; kernel "cuda" uses
   `cuda/forward.cu` instead;
3. `gains` computes the gain and the read-out variance of every token from P k~ and L^-1, all tiles in parallel.

`_forward_scan` has one program per sequence and head, which leaves most of a GPU idle. Long sequences are therefore
split in time: while it steps through one interval, gains and means of the interval before are computed.

`prepare` and `gains` are in `scalar_decay` for decays per head, where they are matrix products, and in `vector_decay`
for decays per key. No exponential of a positive number is taken. A chunk has 64 tokens; the covariance at the entry of
each is stored for the backward pass. Covariances too wide for the registers of a program are in `wide`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import CHUNK, MAX_PROGRAM_WIDTH, TILE
from kalmix.ops._dense.cuda import cuda_kernel
from kalmix.ops._dense.triton import scalar_decay, vector_decay
from kalmix.ops._dense.triton.primitives import (
    UNSPECIALIZED_ARGUMENTS,
    add_noise_blocks,
    bf16_terms,
    decay_covariance,
    decay_kind,
    inverse_cholesky,
    launch_overlapped,
    product_across_warps,
    scan_options,
    split_matmul,
    split_tiles,
    time_splits,
)
from kalmix.ops._dense.triton.wide import forward_wide
from kalmix.ops._linear_memory.triton.forward import ForwardResults, allocate_results
from kalmix.ops._linear_memory.triton.forward import forward as filter_means
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import Tiling, contiguous_rows, locate_sequence
from kalmix.ops._shared.widths import padded_width
from kalmix.segments import Segments


@triton.jit(do_not_specialize=[*UNSPECIALIZED_ARGUMENTS, "n_stride", "g_stride", "i_stride", "j_stride"])
def _forward_scan(
    obs_noise, keys, queries, noise_keys, innovation_cov, tile_decays, covariance, cov_keys, cov_queries, saved_cov,
    final_cov, sequence_table, length, tiles, n_stride, g_stride, i_stride, j_stride, G,
    K: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, TERMS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Step the covariance of one sequence and head from tile to tile."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_tile, token, count = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    TILES_PER_CHUNK: tl.constexpr = CHUNK // TILE
    i, j, row = tl.arange(0, P), tl.arange(0, P), tl.arange(0, TILE)
    in_bounds = (i < K)[:, None] & (j < K)[None, :]
    offsets = sequence * n_stride + head * g_stride + i[:, None] * i_stride + j[None, :] * j_stride
    state = tl.load(covariance + offsets, mask=in_bounds, other=0.0)
    cov_offsets, flat = i[:, None] * P + j[None, :], row[:, None] * P + j[None, :]
    flat_t = row[None, :] * P + i[:, None]  # the covariance is the first factor of products, so it stays in registers
    partner_t = row[None, :] * P + (i ^ 1)[:, None]
    pending_noise = tl.zeros([P], tl.float32)  # process noise not yet added to the covariance
    pending_pair_noise = tl.zeros([P], tl.float32)
    for chunk in range(tl.cdiv(count, CHUNK)):
        state = add_noise_blocks(state, pending_noise, pending_pair_noise, i, j, PAIRED)
        pending_noise = tl.zeros([P], tl.float32)
        pending_pair_noise = tl.zeros([P], tl.float32)
        if SAVE:
            tl.store(saved_cov + ((first_tile + chunk) * G + head) * (P * P) + cov_offsets, state)
        for tile_index in range(
            chunk * TILES_PER_CHUNK, tl.minimum((chunk + 1) * TILES_PER_CHUNK, tl.cdiv(count, TILE))
        ):
            slot = (first_tile * TILES_PER_CHUNK + tile_index) * G + head
            base = slot * (TILE * P)
            key, key_t = tl.load(keys + base + flat), tl.load(keys + base + flat_t)
            noise_key_t = tl.load(noise_keys + base + flat_t)
            tile_decay = tile_decays + slot * (2 + PAIRED) * P
            total_decay = tl.load(tile_decay + i)
            C = tl.load(innovation_cov + slot * (TILE * TILE) + row[:, None] * TILE + tl.arange(0, TILE)[None, :])
            t = tile_index * TILE + row
            obs = tl.load(obs_noise + (token + t) * G + head, mask=t < count, other=float("inf")).to(tl.float32)

            cov_key_t = split_matmul(state, key_t, TERMS) + pending_noise[:, None] * key_t
            if PAIRED:
                cov_key_t += pending_pair_noise[:, None] * tl.load(keys + base + partner_t)
            tl.store(cov_keys + base + flat_t, cov_key_t)
            if VARIANCE:
                query_t = tl.load(queries + base + flat_t)
                cov_query_t = split_matmul(state, query_t, TERMS) + pending_noise[:, None] * query_t
                if PAIRED:
                    cov_query_t += pending_pair_noise[:, None] * tl.load(queries + base + partner_t)
                tl.store(cov_queries + base + flat_t, cov_query_t)
            C += product_across_warps(key, cov_key_t, TERMS, TILE, P)
            whitening = inverse_cholesky(C, tl.min(obs, 0), TILE)  # stored in place of C
            tl.store(
                innovation_cov + slot * (TILE * TILE) + row[:, None] * TILE + tl.arange(0, TILE)[None, :], whitening
            )
            gain = split_matmul(cov_key_t * total_decay[:, None] + noise_key_t, tl.trans(whitening), TERMS)
            state = decay_covariance(state, tile_decay, i, j, DECAY)
            pending_noise = pending_noise * total_decay * total_decay + tl.load(tile_decay + P + i)
            if PAIRED:
                pending_pair_noise = pending_pair_noise * total_decay * total_decay + tl.load(tile_decay + 2 * P + i)
            state -= split_matmul(gain, tl.trans(gain), TERMS)
    state = add_noise_blocks(state, pending_noise, pending_pair_noise, i, j, PAIRED)
    tl.store(final_cov + (sequence * G + head) * (K * K) + i[:, None] * K + j[None, :], state, mask=in_bounds)


class SavedGains(NamedTuple):
    """Tensors that the backward pass of the covariance uses.

    Attributes:
        gain: `[B, T, G, K]`, float32.
        rounded_gain: gains in the dtype of k.
        innovation_var: `[B, T, G]`, variance of the innovation of each token.
        covariances: `[chunks * G * P * P]`, covariance at the entry of every chunk, or empty.
    """

    gain: Tensor
    rounded_gain: Tensor
    innovation_var: Tensor
    covariances: Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    noise_axis: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    segments: Segments | None,
    variance: bool,
    size: int,
    saved_cov: Tensor,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, SavedGains, ForwardResults]:
    """Launch the kernels of the forward pass.

    Args:
        q, k, v, obs_noise, process_noise, log_decay: signals.
        noise_axis: `[B, T, G, K]`, direction of the process noise in each pair of keys (2 j, 2 j + 1), in float32; in
            all directions if `None`. It needs decays per key, equal within a pair.
        mean, covariance: prior.
        segments: assignment of tokens to sequences, or `None`.
        variance: whether to compute the read-out variance.
        size: tokens per tile of the mean.
        saved_cov: output for covariances at the entry of chunks; empty to store none.
        cuda: use `cuda/forward.cu` in place of `_forward_scan`.

    Returns:
        Read-out variances `[B, T, G, 1]`, final mean, final covariance, tensors for the backward pass, and results of
        `delta` (means, and tensors for its backward pass).
    """
    signals, decay_axes = (q, k, obs_noise, process_noise, log_decay, noise_axis), decay_kind(log_decay)
    splits, packed = time_splits(k, obs_noise.shape[2], size, decay_axes, segments), segments is not None
    results = allocate_results(k, v, sum(tiles.num_tiles for _, tiles in splits), size, True, packed)
    if k.shape[3] > MAX_PROGRAM_WIDTH:
        gain, read_var, final_cov, innovation_var = forward_wide(*signals, covariance, segments, variance, saved_cov)
        saved, pending = SavedGains(gain, gain.to(k.dtype), innovation_var, saved_cov), [lambda: None]
    else:
        saved, read_var, final_cov, pending = _gains(
            *signals, covariance, [chunks for chunks, _ in splits], variance, saved_cov, cuda
        )
    states = split_tiles(results.states, [tiles for _, tiles in splits])
    for (_, tiles), tile_states, finish in zip(splits, states, pending, strict=True):
        finish()
        mean = filter_means(
            q, k, v, saved.rounded_gain, log_decay, mean, tiles, True, results._replace(states=tile_states)
        )
    return read_var, mean, final_cov, saved, results


def _gains(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    noise_axis: Tensor | None,
    covariance: Tensor,
    cuts: list[Tiling],
    variance: bool,
    saved_cov: Tensor,
    cuda: bool,
) -> tuple[SavedGains, Tensor, Tensor, list[Callable[[], None]]]:
    """Launch the kernels of the covariance for all time intervals.

    Returns:
        Gains, read-out variances, the final covariance, and one function per interval. Gains and variances of an
        interval are valid after the call of its function.
    """
    (batch, length, key_heads, width), heads, padded = k.shape, obs_noise.shape[2], padded_width(k.shape[3])
    factory_kwargs, decay_axes, packed = (
        {"dtype": torch.float32, "device": k.device},
        decay_kind(log_decay),
        cuts[0].packed,
    )
    tokens = torch.zeros if packed and len(cuts) == 1 else torch.empty  # tokens outside every segment are not written
    gain, innovation_var = (
        tokens(batch, length, heads, width, **factory_kwargs),
        torch.empty(batch, length, heads, **factory_kwargs),
    )
    rounded_gain = gain if k.dtype == torch.float32 else tokens(gain.shape, dtype=k.dtype, device=k.device)
    read_var = tokens(batch, length, heads, 1, **factory_kwargs) if variance else torch.empty(0, **factory_kwargs)
    q, k = contiguous_rows(q), contiguous_rows(k)
    obs_noise, process_noise = obs_noise.contiguous(), process_noise.contiguous()
    logs, obs = k if log_decay is None else log_decay.contiguous(), obs_noise.float()
    layout = (*q.stride()[1:3], *k.stride()[1:3], heads, heads // key_heads)
    shape = {"K": width, "P": padded, "TILE": TILE, "CHUNK": CHUNK, "PACKED": packed, "VARIANCE": variance}
    stages, paired = vector_decay if decay_axes == 2 else scalar_decay, {"PAIRED": noise_axis is not None}
    noise: tuple[Tensor, ...] = (process_noise,)
    stage_shape = shape
    if decay_axes == 2:
        noise, stage_shape = (process_noise, process_noise if noise_axis is None else noise_axis), shape | paired
    prepare_options, gains_options = (
        stages.options(stage, decay_axes, padded, bf16_terms()) | stage_shape for stage in ("prepare", "gains")
    )
    scan_constants = {"DECAY": decay_axes, "SAVE": saved_cov.numel() > 0, **scan_options(padded, bf16_terms())}
    scan_constants |= shape | paired
    pending, scan_kernel = [], cuda_kernel("forward") if cuda else _forward_scan
    saved_by_split = split_tiles(saved_cov, cuts) if saved_cov.numel() else [saved_cov] * len(cuts)
    for cut, saved_split in zip(cuts, saved_by_split, strict=True):
        num_tiles, sizes = cut.num_tiles * (CHUNK // TILE), (cut.tile_table, length, cut.tiles, *layout)
        keys, noise_keys, cov_keys = (torch.empty(num_tiles, heads, TILE, padded, **factory_kwargs) for _ in range(3))
        queries, cov_queries = (torch.empty_like(keys) if variance else keys for _ in range(2))
        innovation_cov = torch.empty(num_tiles, heads, TILE, TILE, **factory_kwargs)
        tile_decays, final_cov = (
            torch.empty(num_tiles, heads, 2 + paired["PAIRED"], padded, **factory_kwargs),
            torch.empty(covariance.shape, **factory_kwargs),
        )
        prepare = Launch(stages.prepare, (num_tiles * heads,), (
            q, k, obs_noise, *noise, logs, keys, queries, noise_keys, innovation_cov, tile_decays, *sizes,
        ), prepare_options)  # fmt: skip
        scan = Launch(scan_kernel, (cut.num_sequences, heads), (
            obs, keys, queries, noise_keys, innovation_cov, tile_decays, covariance, cov_keys, cov_queries, saved_split,
            final_cov, cut.sequence_table, length, cut.tiles, *covariance.stride(), heads,
        ), scan_constants)  # fmt: skip
        gains = Launch(stages.gains, (num_tiles * heads,), (
            q, k, obs_noise, *noise, logs, innovation_cov, cov_keys, cov_queries, gain, rounded_gain,
            innovation_var, read_var, *sizes,
        ), gains_options)  # fmt: skip
        pending.append(launch_overlapped(prepare, scan, [gains], exclusive=len(cuts) == 1))
        covariance = final_cov
    return SavedGains(gain, rounded_gain, innovation_var, saved_cov), read_var, covariance, pending
