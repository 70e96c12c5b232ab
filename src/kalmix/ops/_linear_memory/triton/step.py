"""Triton kernel of the steps of linear memories: one token for each row, in place on a pool of memories.

A program computes some columns of the memory of one row and value head. It loads them once, with all their keys, and
stores them once, so a pool may be updated in place. Sizes depend on widths only: a row has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._shared.step import Slots
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.step import contiguous_width, row_strides

NONE, SCALAR, VECTOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def step_memory(
    q, k, v, gain, log_decay, memory, read, write, mean,
    q_row, q_head, k_row, k_head, v_row, v_head, gain_row, gain_head, decay_row, decay_head, slot_stride,
    heads, group,
    K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, GAIN: tl.constexpr, DECAY: tl.constexpr,
    CORRECTS: tl.constexpr,
):  # fmt: skip
    """Compute M = A M + c (v - [(A M)'k])' and M'q for a block of columns of row, head; [] only if `CORRECTS`."""
    dtype = memory.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active = source >= 0
    keys, columns = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    has_key, has_column = (keys < K) & active, (columns < V) & active
    cells = (head * K + keys)[:, None] * V + columns[None, :]
    inside = has_key[:, None] & has_column[None, :]
    tile = tl.load(memory + source * slot_stride + cells, mask=inside, other=0.0)

    key_head = head // group
    query = tl.load(q + row * q_row + key_head * q_head + keys, mask=has_key, other=0.0).to(dtype)
    key = tl.load(k + row * k_row + key_head * k_head + keys, mask=has_key, other=0.0).to(dtype)
    value = tl.load(v + row * v_row + head * v_head + columns, mask=has_column, other=0.0).to(dtype)
    direction = key
    if GAIN == SCALAR:
        factor = tl.load(gain + row * gain_row + head * gain_head).to(dtype)
        direction = factor * key
    if GAIN == VECTOR:
        direction = tl.load(gain + row * gain_row + head * gain_head + keys, mask=has_key, other=0.0).to(dtype)
    if DECAY == SCALAR:
        tile = tl.exp(tl.load(log_decay + row * decay_row + head * decay_head).to(dtype)) * tile
    if DECAY == VECTOR:
        decay = tl.load(log_decay + row * decay_row + head * decay_head + keys, mask=has_key, other=0.0).to(dtype)
        tile = tl.exp(decay)[:, None] * tile
    if CORRECTS:
        value -= tl.sum(key[:, None] * tile, 0)
    tile += direction[:, None] * value[None, :]
    output = tl.where(has_column, tl.sum(query[:, None] * tile, 0), 0.0)
    tl.store(mean + (row * heads + head) * V + columns, output.to(mean.dtype.element_ty), mask=columns < V)
    tl.store(memory + target * slot_stride + cells, tile, mask=inside & (target >= 0))


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    memory: Tensor,
    slots: Slots,
    out: Tensor | None,
    corrects: bool,
) -> Tensor:
    """Launch the step of `delta` if `corrects`, otherwise of `additive`; return the mean `[B, 1, G, V]`."""
    (batch, _, heads, width), keys = v.shape, k.shape[3]
    q, k, v = (contiguous_width(x) for x in (q, k, v))
    gain, log_decay = (x if x is None or x.ndim == 3 else contiguous_width(x) for x in (gain, log_decay))
    mean = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    strides = [y for x in (q, k, v, gain, log_decay) for y in row_strides(x)]
    Launch(step_memory, (batch, heads, -(-width // columns(width))), (
        q, k, v, v if gain is None else gain, v if log_decay is None else log_decay, memory, *slots, mean,
        *strides, memory.stride(0), heads, heads // q.shape[2],
    ), {
        "K": keys, "V": width, "GAIN": kind(gain), "DECAY": kind(log_decay), "CORRECTS": corrects, **sizes(keys, width),
    }).run()  # fmt: skip
    return mean


def columns(width: int) -> int:
    """Return the columns of a program."""
    return min(32, triton.next_power_of_2(width))


def sizes(keys: int, width: int) -> dict[str, int]:
    """Return tile sizes and warps for keys and values of some widths; they must not depend on the batch."""
    padded = triton.next_power_of_2(keys)
    return {"KEYS": padded, "VALUES": columns(width), "num_warps": 4 if padded > 128 else 2 if padded > 64 else 1}


def kind(x: Tensor | None) -> int:
    """Return which form a gain or decay has: none, one number per head, or one per head and key."""
    return 0 if x is None else x.ndim - 2
