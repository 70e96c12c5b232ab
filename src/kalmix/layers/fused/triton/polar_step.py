"""Magnitudes and directions of one token: one program splits or joins those of a head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._shared.triton.compile_and_launch import Launch


@triton.jit
def split_kernel(
    x, scale, magnitude, direction, x_row, heads, eps, W: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Compute the length of a head, and the scaled head of length 1."""
    row, index, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    inside = column < W
    values = tl.load(x + row * x_row + index * W + column, mask=inside, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(values * values, 0))
    factor = tl.load(scale + index % heads).to(tl.float32) / (length + eps)
    at, part = row * tl.num_programs(1) + index, tl.arange(0, 2)
    tl.store(direction + at * W + column, (factor * values).to(direction.dtype.element_ty), mask=inside)
    tl.store(magnitude + at * 2 + part, tl.where(part == 0, length, 0.0).to(magnitude.dtype.element_ty))


@triton.jit
def join_kernel(
    magnitude, direction, value, scale, result, magnitude_row, direction_row, value_row, eps,
    W: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the sum of two directions of a head, scaled to the length of its magnitude."""
    row, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    inside = column < W
    total = tl.load(direction + row * direction_row + head * W + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(value + row * value_row + head * W + column, mask=inside, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(total * total, 0))
    factor = tl.load(scale + head).to(tl.float32) / (length + eps)
    factor *= tl.load(magnitude + row * magnitude_row + head * 2).to(tl.float32)
    at = result + (row * tl.num_programs(1) + head) * W + column
    tl.store(at, (factor * total).to(result.dtype.element_ty), mask=inside)


def split(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launch the kernel; see `split_step`."""
    (batch, _, columns), heads = x.shape, scale.shape[0]
    width = columns // (3 * heads)
    magnitude = torch.empty(batch, 1, 3 * heads, 2, dtype=x.dtype, device=x.device)
    direction = torch.empty(batch, 1, 3 * heads, width, dtype=x.dtype, device=x.device)
    Launch(split_kernel, (batch, 3 * heads), (x, scale, magnitude, direction, x.stride(0), heads, eps), {
        "W": width, "WIDTH": triton.next_power_of_2(width), "num_warps": 1,
    }).run()  # fmt: skip
    return magnitude, direction


def join(magnitude: Tensor, direction: Tensor, value: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Launch the kernel; see `join_step`."""
    parts = [y if y[:1].is_contiguous() else y.contiguous() for y in (magnitude, direction, value)]
    batch, _, heads, width = value.shape
    result = torch.empty(batch, 1, heads * width, dtype=value.dtype, device=value.device)
    Launch(join_kernel, (batch, heads), (*parts, scale, result, *(y.stride(0) for y in parts), eps), {
        "W": width, "WIDTH": triton.next_power_of_2(width), "num_warps": 1,
    }).run()  # fmt: skip
    return result
