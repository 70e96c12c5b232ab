"""Triton kernel of the step of `dense`: one token for each row, in place on a pool of beliefs.

A program predicts and updates the covariance of one row and value head. Up to 128 keys the covariance is in registers.
Wider ones are read three times, in blocks of columns, from their lower triangle. Sizes depend on widths only: a row has
the same bits in any batch.

Given the gain, the mean is a memory of `delta`, so the step of `delta` updates it. That step has many small programs,
which use more of the memory bandwidth than programs that hold a covariance. With rotations, the program that updates
the covariance updates the mean, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._linear_memory.triton.step import step as step_memory
from kalmix.ops._shared.step import Slots
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.step import contiguous_width, matrix_sizes, row_strides, take_block

WARPS = 4  # of a program at 128 keys without rotations: a thread adds more columns before threads exchange sums
NONE, SCALAR, VECTOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_transition(
    log_decay, angle, index, active, dtype: tl.constexpr,
    K: tl.constexpr, RATES: tl.constexpr, DECAY: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """Load decays, cosines and signed sines of some rows of a memory; row i becomes d (c x_i + s x_partner)."""
    inside = (index < K) & active
    decay = tl.full(index.shape, 1.0, dtype)
    if DECAY == SCALAR:
        decay *= tl.exp(tl.load(log_decay).to(dtype))
    if DECAY == VECTOR:
        decay = tl.exp(tl.load(log_decay + index % RATES, mask=inside, other=0.0).to(dtype))
    cos, sin = tl.full(index.shape, 1.0, dtype), tl.zeros(index.shape, dtype)
    if ROTATES:
        turn = tl.load(angle + index % (K // 2), mask=inside, other=0.0).to(dtype)
        cos, sin = tl.cos(turn), tl.where(index < K // 2, -tl.sin(turn), tl.sin(turn))
    return decay, cos, sin


@triton.jit
def load_covariance(
    at, rows, row_transition, columns, column_transition, noise, active,
    K: tl.constexpr, LOWER: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """Load a block of columns of a covariance, in strips `[KEYS, strips, STRIP]`, and predict it.

    With `LOWER`, load it from the lower triangle.
    """
    i, j = rows[:, None, None], columns[None, :, :]
    inside = (i < K) & (j < K) & active
    if LOWER:
        tile = tl.load(at + tl.maximum(i, j) * K + tl.minimum(i, j), mask=inside, other=0.0)
    else:
        tile = tl.load(at + i * K + j, mask=inside, other=0.0)
    diffuses = i == j
    if ROTATES:
        HALF: tl.constexpr = K // 2
        diffuses = diffuses & (i < HALF)
        partner_i, partner_j = tl.where(i < HALF, i + HALF, i - HALF), tl.where(j < HALF, j + HALF, j - HALF)
        cos_i, sin_i = row_transition[1][:, None, None], row_transition[2][:, None, None]
        cos_j, sin_j = column_transition[1][None, :, :], column_transition[2][None, :, :]
        across_j = tl.load(at + i * K + partner_j, mask=inside, other=0.0)
        across_i = tl.load(at + partner_i * K + j, mask=inside, other=0.0)
        across_both = tl.load(at + partner_i * K + partner_j, mask=inside, other=0.0)
        tile = cos_j * (cos_i * tile + sin_i * across_i) + sin_j * (cos_i * across_j + sin_i * across_both)
    tile *= row_transition[0][:, None, None] * column_transition[0][None, :, :]
    return tile + tl.where(diffuses & inside, noise, 0.0)


@triton.jit
def column_indices(block, COLUMNS: tl.constexpr, STRIP: tl.constexpr):
    """Return the columns of a block, in strips `[strips, STRIP]`."""
    return block * COLUMNS + tl.arange(0, COLUMNS // STRIP)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]


@triton.jit
def outer(x, y, block, COLUMNS: tl.constexpr, STRIP: tl.constexpr):
    """Return a block of columns of the outer product of two vectors, in strips."""
    return x[:, None, None] * tl.reshape(take_block(y, block, COLUMNS), [COLUMNS // STRIP, STRIP])[None, :, :]


@triton.jit
def multiply(tile, x, block):
    """Return the product of a block of columns, in strips, and a block of a vector.

    A thread adds all strips before threads exchange sums.
    """
    STRIPS: tl.constexpr = tile.shape[1]
    STRIP: tl.constexpr = tile.shape[2]
    part = tl.reshape(take_block(x, block, STRIPS * STRIP), [STRIPS, STRIP])
    return tl.sum(tl.sum(tile * part[None, :, :], 1), 1)


@triton.jit
def step_belief(
    q, k, v, obs_noise, process_noise, log_decay, angle, means, covariances, read, write, mean, variance, gains,
    q_row, q_head, k_row, k_head, v_row, v_head, obs_row, obs_head, process_row, process_head,
    decay_row, decay_head, angle_row, angle_head, mean_slot, covariance_slot, heads, group,
    K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, STRIP: tl.constexpr,
    VALUES: tl.constexpr, RATES: tl.constexpr, DECAY: tl.constexpr, ROTATES: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    """Predict the belief of a row and head, update it in Joseph form as `joseph_update` does, and read it.

    Without rotations, store the gain instead of updating and reading the mean.
    """
    dtype: tl.constexpr = covariances.dtype.element_ty
    BLOCKS: tl.constexpr = KEYS // COLUMNS
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active, stored = source >= 0, (source >= 0) & (target >= 0)
    keys = tl.arange(0, KEYS)
    has_key = (keys < K) & active
    q += row * q_row + (head // group) * q_head
    k += row * k_row + (head // group) * k_head
    log_decay += row * decay_row + head * decay_head
    angle += row * angle_row + head * angle_head
    query = tl.load(q + keys, mask=has_key, other=0.0).to(dtype)
    key = tl.load(k + keys, mask=has_key, other=0.0).to(dtype)
    observed = tl.load(obs_noise + row * obs_row + head * obs_head).to(dtype)
    added = tl.load(process_noise + row * process_row + head * process_head).to(dtype)
    transition = load_transition(log_decay, angle, keys, active, dtype, K, RATES, DECAY, ROTATES)

    at = covariances + source * covariance_slot + head * K * K
    to = covariances + target * covariance_slot + head * K * K
    if BLOCKS == 1:
        others = column_indices(0, COLUMNS, STRIP)
        across = load_transition(log_decay, angle, others, active, dtype, K, RATES, DECAY, ROTATES)
        tile = load_covariance(at, keys, transition, others, across, added, active, K, False, ROTATES)
        cov_key = multiply(tile, key, 0)
        gain = cov_key / (tl.sum(key * cov_key, 0) + observed)
        tile -= outer(gain, cov_key, 0, COLUMNS, STRIP)
        cross = multiply(tile, key, 0) - gain * observed
        tile -= outer(cross, gain, 0, COLUMNS, STRIP)
        mirrored = tl.reshape(tl.trans(tl.reshape(tile, [KEYS, KEYS])), [KEYS, COLUMNS // STRIP, STRIP])
        tile = (tile + mirrored) * 0.5
        spread = tl.sum(multiply(tile, query, 0) * query, 0)
        tl.debug_barrier()  # every warp has read the old covariance
        i, j = keys[:, None, None], others[None, :, :]
        tl.store(to + i * K + j, tile, mask=(i < K) & (j < K) & stored)
    else:
        cov_key = tl.zeros([KEYS], dtype)
        for block in range(BLOCKS):
            others = column_indices(block, COLUMNS, STRIP)
            across = load_transition(log_decay, angle, others, active, dtype, K, RATES, DECAY, ROTATES)
            tile = load_covariance(at, keys, transition, others, across, added, active, K, True, ROTATES)
            cov_key += multiply(tile, key, block)
        gain = cov_key / (tl.sum(key * cov_key, 0) + observed)
        cross = -gain * observed
        for block in range(BLOCKS):
            others = column_indices(block, COLUMNS, STRIP)
            across = load_transition(log_decay, angle, others, active, dtype, K, RATES, DECAY, ROTATES)
            tile = load_covariance(at, keys, transition, others, across, added, active, K, True, ROTATES)
            tile -= outer(gain, cov_key, block, COLUMNS, STRIP)
            cross += multiply(tile, key, block)
        spread = tl.zeros([], dtype)
        for reverse in range(BLOCKS):  # from the last block: the lower triangle of earlier ones is still the old one
            block = BLOCKS - 1 - reverse
            others = column_indices(block, COLUMNS, STRIP)
            across = load_transition(log_decay, angle, others, active, dtype, K, RATES, DECAY, ROTATES)
            tile = load_covariance(at, keys, transition, others, across, added, active, K, True, ROTATES)
            tile -= 0.5 * (outer(gain, cov_key, block, COLUMNS, STRIP) + outer(cov_key, gain, block, COLUMNS, STRIP))
            tile -= 0.5 * (outer(cross, gain, block, COLUMNS, STRIP) + outer(gain, cross, block, COLUMNS, STRIP))
            spread += tl.sum(multiply(tile, query, block) * query, 0)
            tl.debug_barrier()
            i, j = keys[:, None, None], others[None, :, :]
            tl.store(to + i * K + j, tile, mask=(i < K) & (j < K) & stored)
            tl.debug_barrier()
    if VARIANCE:
        tl.store(variance + row * heads + head, tl.where(active, spread, 0.0).to(variance.dtype.element_ty))

    if ROTATES:
        decay, cos, sin = transition
        for first in range(0, V, VALUES):
            columns = first + tl.arange(0, VALUES)
            has_column = (columns < V) & active
            inside = has_key[:, None] & has_column[None, :]
            cells = (head * K + keys)[:, None] * V + columns[None, :]
            memory = tl.load(means + source * mean_slot + cells, mask=inside, other=0.0)
            partner = tl.where(keys < K // 2, keys + K // 2, keys - K // 2)
            at_partner = means + source * mean_slot + (head * K + partner)[:, None] * V + columns[None, :]
            memory = cos[:, None] * memory + sin[:, None] * tl.load(at_partner, mask=inside, other=0.0)
            memory *= decay[:, None]
            value = tl.load(v + row * v_row + head * v_head + columns, mask=has_column, other=0.0).to(dtype)
            memory += gain[:, None] * (value - tl.sum(key[:, None] * memory, 0))[None, :]
            total = tl.where(has_column, tl.sum(query[:, None] * memory, 0), 0.0)
            tl.store(mean + (row * heads + head) * V + columns, total.to(mean.dtype.element_ty), mask=columns < V)
            tl.debug_barrier()  # every warp has read the partners of its rows
            tl.store(means + target * mean_slot + cells, memory, mask=inside & stored)
    else:
        tl.store(gains + (row * heads + head) * K + keys, gain, mask=keys < K)


def step(
    signals: DenseSignals, pool: DenseBelief, slots: Slots, out: tuple[Tensor, Tensor | None] | None, variance: bool
) -> tuple[Tensor, Tensor | None]:
    """Launch the steps; return the mean `[B, 1, G, V]`, and the variance `[B, 1, G, 1]` if requested."""
    q, k, v = (contiguous_width(x) for x in signals[:3])
    noises = signals[3:5]
    log_decay, angle = (x if x is None or x.ndim == 3 else contiguous_width(x) for x in signals[5:])
    (batch, _, heads, width), keys = v.shape, k.shape[3]
    mean, read_variance = (None, None) if out is None else out
    mean = torch.empty(v.shape, dtype=v.dtype, device=v.device) if mean is None else mean
    if variance and read_variance is None:
        read_variance = torch.empty(batch, 1, heads, 1, dtype=pool.mean.dtype, device=v.device)
    gains = None
    if angle is None:
        gains = torch.empty(batch, 1, heads, keys, dtype=pool.covariance.dtype, device=v.device)
    sizes = matrix_sizes(keys, width)
    if sizes["KEYS"] == 128 and angle is None and pool.mean.dtype == torch.float32:
        sizes["num_warps"] = WARPS
    Launch(step_belief, (batch, heads), (
        q, k, v, *noises, v if log_decay is None else log_decay, v if angle is None else angle, *pool, *slots,
        mean, mean if read_variance is None else read_variance, mean if gains is None else gains,
        *(y for x in (q, k, v, *noises, log_decay, angle) for y in row_strides(x)), *(x.stride(0) for x in pool),
        heads, heads // q.shape[2],
    ), {
        "K": keys, "V": width, "DECAY": 0 if log_decay is None else log_decay.ndim - 2, "ROTATES": angle is not None,
        "RATES": log_decay.shape[3] if log_decay is not None and log_decay.ndim == 4 else 1, "VARIANCE": variance,
        **sizes,
    }).run()  # fmt: skip
    if gains is not None:
        step_memory(q, k, v, gains, log_decay, pool.mean, slots, mean, corrects=True)
    return mean, read_variance if variance else None
