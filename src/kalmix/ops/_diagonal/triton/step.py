"""Triton kernel of the step of `diagonal`: one token for each row, in place on a pool of cells.

A program computes some columns of the cells of one row and value head. Sizes depend on widths only: a row has the same
bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.step import Slots
from kalmix.ops._shared.triton.cell_update import CELLS, update_cells
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.step import contiguous_width, row_strides


@triton.jit
def step_cells(
    q, k, v, precision, log_decay, noise, means, variances, read, write, mean, variance,
    q_row, q_head, k_row, k_head, v_row, v_head, precision_row, precision_head, decay_row, noise_row,
    mean_slot, variance_slot, heads, group,
    K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    """Predict and update the cells of a block of columns of a row and head, and read them."""
    dtype = means.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active = source >= 0
    keys, columns = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    has_key, has_column = (keys < K) & active, (columns < V) & active
    cells = (head * K + keys)[:, None] * V + columns[None, :]
    inside = has_key[:, None] & has_column[None, :]
    old_mean = tl.load(means + source * mean_slot + cells, mask=inside, other=0.0)
    old_variance = tl.load(variances + source * variance_slot + cells, mask=inside, other=0.0)
    decay = tl.exp(tl.load(log_decay + row * decay_row + cells, mask=inside, other=0.0).to(dtype))
    added = tl.load(noise + row * noise_row + cells, mask=inside, other=0.0).to(dtype)

    key_head = head // group
    query = tl.load(q + row * q_row + key_head * q_head + keys, mask=has_key, other=0.0).to(dtype)[:, None]
    key = tl.load(k + row * k_row + key_head * k_head + keys, mask=has_key, other=0.0).to(dtype)[:, None]
    value = tl.load(v + row * v_row + head * v_head + columns, mask=has_column, other=0.0).to(dtype)[None, :]
    at_weight = precision + row * precision_row + head * precision_head + columns
    weight = tl.load(at_weight, mask=has_column, other=0.0).to(dtype)[None, :]

    cell_mean, cell_variance = update_cells(old_mean, old_variance, decay, added, key, value, weight)
    at_output = (row * heads + head) * V + columns
    total = tl.where(has_column, tl.sum(query * cell_mean, 0), 0.0)
    tl.store(mean + at_output, total.to(mean.dtype.element_ty), mask=columns < V)
    if VARIANCE:
        total = tl.where(has_column, tl.sum(query * query * cell_variance, 0), 0.0)
        tl.store(variance + at_output, total.to(variance.dtype.element_ty), mask=columns < V)
    stored = inside & (target >= 0)
    tl.store(means + target * mean_slot + cells, cell_mean, mask=stored)
    tl.store(variances + target * variance_slot + cells, cell_variance, mask=stored)


def step(
    signals: DiagonalSignals,
    pool: DiagonalBelief,
    slots: Slots,
    out: tuple[Tensor, Tensor | None] | None,
    variance: bool,
) -> tuple[Tensor, Tensor | None]:
    """Launch the step; return mean and variance `[B, 1, G, V]`, the latter if requested."""
    q, k, v, precision = (contiguous_width(x) for x in signals[:4])
    dynamics = [x.contiguous() for x in signals[4:]]
    (batch, _, heads, width), keys = v.shape, k.shape[3]
    mean, read_variance = (None, None) if out is None else out
    mean = torch.empty(v.shape, dtype=v.dtype, device=v.device) if mean is None else mean
    if variance and read_variance is None:
        read_variance = torch.empty(v.shape, dtype=pool.mean.dtype, device=v.device)
    padded = triton.next_power_of_2(keys)
    values = min(max(1, CELLS // padded), triton.next_power_of_2(width))
    strides = [y for x in (q, k, v, precision) for y in row_strides(x)]
    strides += [0 if x.ndim == 3 else x.stride(0) for x in dynamics]
    Launch(step_cells, (batch, heads, -(-width // values)), (
        q, k, v, precision, *dynamics, *pool, *slots, mean, mean if read_variance is None else read_variance,
        *strides, *(x.stride(0) for x in pool), heads, heads // q.shape[2],
    ), {
        "K": keys, "V": width, "KEYS": padded, "VALUES": values, "VARIANCE": variance, "num_warps": 4,
    }).run()  # fmt: skip
    return mean, read_variance if variance else None
