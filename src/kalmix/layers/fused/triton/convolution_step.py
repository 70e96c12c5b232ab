"""Step of the short convolution: one token for each row, in place on a pool of last inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.triton.convolution import choose, locate_block, sum_head
from kalmix.layers.fused.triton.convolution_launch import count_blocks, pad_width
from kalmix.layers.fused.triton.unit_norm import inverse_length
from kalmix.layers.fused.unit_norm import QueryKeyColumns
from kalmix.ops._shared.step import Slots
from kalmix.ops._shared.triton.compile_and_launch import Launch

BLOCK = 256  # channels of a program


@triton.jit
def step_kernel(
    x, weight, bias, pool, read, write, q, k, v, x_row, slot_stride, v_row,
    QUERY_LENGTH: tl.constexpr, EPS: tl.constexpr,
    C: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    ON_LENGTH: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Convolve the last S - 1 inputs and the present one, and move the inputs by one token; see `convolution.py`."""
    row = tl.program_id(0).to(tl.int64)
    section, column, inside = locate_block(tl.program_id(1), C, KEYS, K, P, BLOCK)
    channel = section * KEYS + column
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active, stored = inside & (source >= 0), inside & (source >= 0) & (target >= 0)
    total = tl.zeros([BLOCK], DTYPE)
    if BIAS:
        total = tl.load(bias + channel, mask=inside, other=0.0).to(DTYPE)
    present = tl.load(x + row * x_row + channel, mask=active, other=0.0)
    for tap in tl.static_range(S):
        factor = tl.load(weight + channel * S + tap, mask=inside, other=0.0).to(DTYPE)
        if tap < S - 1:
            earlier = tl.load(pool + source * slot_stride + tap * C + channel, mask=active, other=0.0)
            if tap > 0:
                tl.store(pool + target * slot_stride + (tap - 1) * C + channel, earlier, mask=stored)
            total += factor * earlier.to(DTYPE)
        else:
            if S > 1:
                newest = present.to(pool.dtype.element_ty)
                tl.store(pool + target * slot_stride + (tap - 1) * C + channel, newest, mask=stored)
            total += factor * present.to(DTYPE)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    if P > 0:  # the host passes numbers as float32, so these are constants
        length, one, eps = tl.full([1], QUERY_LENGTH, DTYPE), tl.full([1], 1.0, DTYPE), tl.full([1], EPS, DTYPE)
        inverse, _ = inverse_length(sum_head(total * total, P), eps, ON_LENGTH)
        total = tl.where(section < 2, total * (choose(section, length, one, one, KEYS) * inverse), total)
    y = choose(section, q, k, v, KEYS) + row * choose(section, KEYS, KEYS, v_row, KEYS)
    tl.store(y + column, tl.where(active, total, 0.0).to(y.dtype.element_ty), mask=inside)


def step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slots: Slots,
    activation: str | None,
    columns: QueryKeyColumns,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the step; return queries, keys and values `[B, 1, columns]`. `out` is a tensor for the values."""
    batch, (channels, taps), (keys, norm) = x.shape[0], weight.shape, columns
    x, weight = x if x.stride(2) == 1 else x.contiguous(), weight.contiguous()
    q, k = x.new_empty(batch, 1, keys), x.new_empty(batch, 1, keys)
    v = x.new_empty(batch, 1, channels - 2 * keys) if out is None else out
    padded = pad_width(norm)
    block = max(padded, min(BLOCK, max(32, triton.next_power_of_2(channels))))
    Launch(step_kernel, (batch, count_blocks(channels, columns, block)), (
        x, weight, weight if bias is None else bias, pool, *slots, q, k, v, x.stride(0), pool.stride(0), v.stride(0),
    ), {
        "QUERY_LENGTH": norm.query_length, "EPS": norm.eps,
        "C": channels, "S": taps, "KEYS": keys, "K": norm.width, "P": padded, "ON_LENGTH": norm.eps_on_length,
        "BLOCK": block, "BIAS": bias is not None, "SILU": activation == "silu",
        "DTYPE": tl.float64 if x.dtype == torch.float64 else tl.float32, "num_warps": 2,
    }).run()  # fmt: skip
    return q, k, v
