"""Step of the short convolution: one token for each row, in place on a pool of last inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._shared.step import Slots
from kalmix.ops._shared.triton.compile_and_launch import Launch

BLOCK = 256  # channels of a program


@triton.jit
def step_kernel(
    x, weight, bias, pool, read, write, y, x_row, slot_stride,
    C: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Convolve the last S - 1 inputs and the present one, and move the inputs by one token."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    inside = channel < C
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
    tl.store(y + row * C + channel, tl.where(active, total, 0.0).to(y.dtype.element_ty), mask=inside)


def step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slots: Slots,
    activation: str | None,
    out: Tensor | None,
) -> Tensor:
    """Launch the step; return `[B, 1, C]`."""
    batch, (channels, taps) = x.shape[0], weight.shape
    x, weight = x if x.stride(2) == 1 else x.contiguous(), weight.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    block = min(BLOCK, max(32, triton.next_power_of_2(channels)))
    Launch(step_kernel, (batch, -(-channels // block)), (
        x, weight, weight if bias is None else bias, pool, *slots, y, x.stride(0), pool.stride(0),
    ), {
        "C": channels, "S": taps, "BLOCK": block, "BIAS": bias is not None, "SILU": activation == "silu",
        "DTYPE": tl.float64 if x.dtype == torch.float64 else tl.float32, "num_warps": 2,
    }).run()  # fmt: skip
    return y
