"""Precision 1 / (softplus(raw) + floor): one program computes a block of rows and columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.triton.rows import rows_of
from kalmix.ops._shared.triton.compile_and_launch import Launch

BLOCK, ROWS, WARPS = 256, 8, 8  # columns, rows and warps of a program


@triton.jit
def _locate(rows, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return rows and columns of a program, and which of them exist."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64)[:, None], column[None, :], (row < rows)[:, None] & (column < C)[None, :]


@triton.jit
def precision_of(raw, floor):
    """Return 1 / (softplus(raw) + floor), without cancellation."""
    small = tl.exp(-tl.abs(raw))
    above = 1.0 + small
    # log(1 + small): the quotient cancels the rounding of `above`
    logarithm = tl.where(above == 1.0, small, small * (tl.log(above) / tl.where(above == 1.0, 1.0, above - 1.0)))
    return 1.0 / (tl.where(raw > 0.0, raw, 0.0) + logarithm + floor)


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(x, y, rows, stride, floor, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row, column, mask = _locate(rows, C, BLOCK, ROWS)
    raw = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * C + column, precision_of(raw, floor), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(x, y, dy, dx, rows, stride, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row, column, mask = _locate(rows, C, BLOCK, ROWS)
    raw = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    precision = tl.load(y + row * C + column, mask=mask, other=0.0)
    grad = -tl.load(dy + row * C + column, mask=mask, other=0.0) * precision * precision * tl.sigmoid(raw)
    tl.store(dx + row * C + column, grad.to(dx.dtype.element_ty), mask=mask)


def forward(raw: Tensor, floor: float) -> Tensor:
    """Return the precision in float32, contiguous."""
    y, x = raw.new_empty(raw.shape, dtype=torch.float32), rows_of(raw)
    grid, constants = _blocks(x)
    Launch(_forward_kernel, grid, (x, y, x.shape[0], x.stride(0), floor), constants).run()
    return y


def backward(raw: Tensor, precision: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `raw`, contiguous."""
    dx, x = raw.new_empty(raw.shape), rows_of(raw)
    grid, constants = _blocks(x)
    arguments = x, precision.contiguous(), grad.contiguous(), dx, x.shape[0], x.stride(0)
    Launch(_backward_kernel, grid, arguments, constants).run()
    return dx


def _blocks(x: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and constants of both kernels."""
    rows, columns = x.shape
    constants = {"C": columns, "BLOCK": BLOCK, "ROWS": ROWS, "num_warps": WARPS}
    return (-(-rows // ROWS), -(-columns // BLOCK)), constants
