"""Product of an activated gate and a value, which are halves of the rows of one tensor or of one projection."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kalmix.layers.fused.triton.activation import activation_and_slope
from kalmix.layers.fused.triton.rows import rows_of
from kalmix.ops._shared.gpu import shared_memory
from kalmix.ops._shared.triton.compile_and_launch import Launch

BLOCKS = (1024, 512)  # columns of a program
PROJECTION = {"BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4}  # BN output and BK input columns of a tile


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


@triton.jit(do_not_specialize=["rows"])
def _project_kernel(
    x, weight, y, rows, stride,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Project all rows to a block of columns of the gate and of the value, and multiply them."""
    row, column = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    exists, inside = (row < rows)[:, None], (column < WIDTH)[None, :]
    gate, value = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for begin in range(0, D, BK):
        k = begin + tl.arange(0, BK)
        tokens = tl.load(x + row[:, None] * stride + k[None, :], mask=exists & (k < D)[None, :], other=0.0)
        at, mask = weight + column[None, :] * D + k[:, None], inside & (k < D)[:, None]
        gate_weight, value_weight = tl.load(at, mask=mask, other=0.0), tl.load(at + WIDTH * D, mask=mask, other=0.0)
        if EXACT:  # Triton's interpreter treats bfloat16 as integers
            tokens = tokens.to(tl.float32)
            gate_weight, value_weight = gate_weight.to(tl.float32), value_weight.to(tl.float32)
        gate, value = tl.dot(tokens, gate_weight, gate), tl.dot(tokens, value_weight, value)
    dtype: tl.constexpr = y.dtype.element_ty
    activated, _ = activation_and_slope(gate.to(dtype).to(tl.float32), "silu")
    out = activated * value.to(dtype).to(tl.float32)
    tl.store(y + row[:, None] * WIDTH + column[None, :], out.to(dtype), mask=exists & inside)


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


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Return `swiglu(x weight')` `[..., F]` for `x` `[..., D]` of few rows."""
    width, tokens = weight.shape[0] // 2, rows_of(x)
    y = x.new_empty(*x.shape[:-1], width)
    tile = _projection_tile(tokens.shape[0], shared_memory(x.device))
    arguments = tokens, weight.contiguous(), y, tokens.shape[0], tokens.stride(0)
    constants = {"D": x.shape[-1], "WIDTH": width, "EXACT": knobs.runtime.interpret, **tile}
    Launch(_project_kernel, (-(-width // tile["BN"]),), arguments, constants).run()
    return y


def _projection_tile(rows: int, limit: int) -> dict[str, int]:
    """Return the options of `_project_kernel` that fit `limit` bytes of shared memory."""
    padded = max(16, triton.next_power_of_2(rows))
    bytes_of_stage = 2 * PROJECTION["BK"] * (padded + 2 * PROJECTION["BN"])
    return PROJECTION | {"BM": padded, "num_stages": max(2, min(PROJECTION["num_stages"], limit // bytes_of_stage))}


def _blocks(y: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return a grid of rows and blocks of columns, and constants; blocks are the largest that pad least."""
    width = y.shape[-1]
    block = min(BLOCKS, key=lambda size: -(-width // size) * size)
    return (y.numel() // width, -(-width // block)), {"WIDTH": width, "BLOCK": block, "num_warps": block // 256}
