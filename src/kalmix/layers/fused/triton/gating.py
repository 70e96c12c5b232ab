"""Product of an activated gate and a value, which are halves of the rows of one tensor."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.triton.activation import activation_and_slope
from kalmix.ops._shared.triton.compile_and_launch import Launch

BLOCKS = (1024, 512)  # columns of a program


@triton.jit
def _forward_kernel(x, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    x += row * (2 * WIDTH) + column
    gate, _ = activation_and_slope(tl.load(x, mask=mask, other=0.0).to(tl.float32), "silu")
    out = gate * tl.load(x + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(x, dy, dx, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    x += row * (2 * WIDTH) + column
    dx += row * (2 * WIDTH) + column
    gate, slope = activation_and_slope(tl.load(x, mask=mask, other=0.0).to(tl.float32), "silu")
    value = tl.load(x + WIDTH, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx, (grad * value * slope).to(dx.dtype.element_ty), mask=mask)
    tl.store(dx + WIDTH, (grad * gate).to(dx.dtype.element_ty), mask=mask)


def forward(x: Tensor) -> Tensor:
    """Return the product `[..., F]` for `x` `[..., 2 F]`."""
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    grid, constants = _blocks(y)
    Launch(_forward_kernel, grid, (x.contiguous(), y), constants).run()
    return y


def backward(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `x`."""
    dx = x.new_empty(x.shape)
    grid, constants = _blocks(grad)
    Launch(_backward_kernel, grid, (x.contiguous(), grad.contiguous(), dx), constants).run()
    return dx


def _blocks(y: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return a grid of rows and blocks of columns, and constants; blocks are the largest that pad least."""
    width = y.shape[-1]
    block = min(BLOCKS, key=lambda size: -(-width // size) * size)
    return (y.numel() // width, -(-width // block)), {"WIDTH": width, "BLOCK": block, "num_warps": block // 256}
