"""Step of cells and the parts around it: a program computes all slots of a block of channels of one row.

Sizes depend on widths only: a row has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.layers.fused.cell_inputs import GatedSkip, RawCellSignals
from kalmix.layers.fused.precision import NOISE_FLOOR
from kalmix.layers.fused.triton.activation import activation_and_slope
from kalmix.layers.fused.triton.precision import precision_of
from kalmix.layers.fused.triton.unit_norm import inverse_length
from kalmix.layers.fused.unit_norm import UnitNorm
from kalmix.ops._shared.step import Slots
from kalmix.ops._shared.triton.cell_update import CELLS, update_cells
from kalmix.ops._shared.triton.compile_and_launch import Launch


@triton.jit
def _load_unit(x, slot, mask, EPS: tl.constexpr):
    """Load a vector, and scale it to length 1, rounded as `l2_normalize` rounds it."""
    value = tl.load(x + slot, mask=mask, other=0.0)
    wide = value.to(tl.float32)
    inverse, _ = inverse_length(tl.sum(wide * wide, 0), EPS, False)
    return (wide * inverse).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def cell_step(
    q, k, v, noise, z, gate, scale, log_decay, process_noise, means, variances, read, write, y,
    q_row, k_row, v_row, noise_row, z_row, gate_row, mean_slot, variance_slot,
    S: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Normalise, predict, update, read, and apply skip and gate."""
    row = tl.program_id(0).to(tl.int64)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active = source >= 0
    slot, channel = tl.arange(0, SLOTS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_slot, has_channel = (slot < S) & active, (channel < C) & active
    cells, inside = slot[:, None] * C + channel[None, :], has_slot[:, None] & has_channel[None, :]
    mean = tl.load(means + source * mean_slot + cells, mask=inside, other=0.0)
    variance = tl.load(variances + source * variance_slot + cells, mask=inside, other=0.0)
    decay = tl.exp(tl.load(log_decay + cells, mask=inside, other=0.0))
    added = tl.load(process_noise + cells, mask=inside, other=0.0)

    query = _load_unit(q + row * q_row, slot, has_slot, EPS)
    key = _load_unit(k + row * k_row, slot, has_slot, EPS)
    value = tl.load(v + row * v_row + channel, mask=has_channel, other=0.0).to(tl.float32)
    weight = precision_of(tl.load(noise + row * noise_row + channel, mask=has_channel, other=0.0).to(tl.float32), FLOOR)
    mean, variance = update_cells(mean, variance, decay, added, key[:, None], value[None, :], weight[None, :])
    stored = inside & (target >= 0)
    tl.store(means + target * mean_slot + cells, mean, mask=stored)
    tl.store(variances + target * variance_slot + cells, variance, mask=stored)

    total = tl.sum(query[:, None] * mean, 0).to(v.dtype.element_ty).to(tl.float32)  # rounded as the op rounds it
    factor = tl.load(scale + channel, mask=has_channel, other=0.0).to(tl.float32)
    total += factor * tl.load(z + row * z_row + channel, mask=has_channel, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_row + channel, mask=has_channel, other=0.0).to(tl.float32)
    activated, _ = activation_and_slope(opened, "silu")
    total = tl.where(active, total * activated, 0.0)
    tl.store(y + row * C + channel, total.to(y.dtype.element_ty), mask=channel < C)


def step(
    signals: RawCellSignals, skip: GatedSkip, dynamics: tuple[Tensor, Tensor], pool: DiagonalBelief, slots: Slots
) -> Tensor:
    """Launch the step; return y `[B, 1, C]`."""
    (batch, _, channels), count = signals.v.shape, signals.k.shape[2]
    y = torch.empty(signals.v.shape, dtype=signals.v.dtype, device=signals.v.device)
    rows = (*signals, skip.z, skip.gate)
    padded = triton.next_power_of_2(count)
    block = min(max(1, CELLS // padded), triton.next_power_of_2(channels))
    Launch(cell_step, (batch, -(-channels // block)), (
        *rows, skip.scale.contiguous(), *(x.contiguous() for x in dynamics), *pool, *slots, y,
        *(x.stride(0) for x in (*rows, *pool)),
    ), {
        "S": count, "C": channels, "SLOTS": padded, "BLOCK": block, "FLOOR": NOISE_FLOOR, "EPS": UnitNorm().eps,
        "num_warps": 4,
    }).run()  # fmt: skip
    return y
