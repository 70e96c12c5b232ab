"""Scaled skip connection and gate: one program computes a block of rows and columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.triton.activation import activation_and_slope
from kalmix.layers.fused.triton.rows import rows_of
from kalmix.ops._shared.triton.compile_and_launch import Launch

BLOCK, ROWS, WARPS = 256, 8, 8  # columns, rows and warps of a program
MAX_PARTIALS = 1024  # programs of the backward pass; each adds up gradients of the scale for its rows


@triton.jit
def _load(x, row, column, stride, mask):
    return tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x, z, scale, gate, y, rows, x_stride, z_stride, gate_stride,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < C)[None, :]
    factor = tl.load(scale + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    total = _load(x, row, column, x_stride, mask) + factor * _load(z, row, column, z_stride, mask)
    weight, _ = activation_and_slope(_load(gate, row, column, gate_stride, mask), "silu")
    at = y + row.to(tl.int64)[:, None] * C + column[None, :]
    tl.store(at, (total * weight).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    x, z, scale, gate, dy, dx, dz, dgate, partial, rows, tiles, x_stride, z_stride, gate_stride,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(scale + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    collected = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < C)[None, :]
        skip = _load(z, row, column, z_stride, mask)
        total = _load(x, row, column, x_stride, mask) + factor * skip
        weight, slope = activation_and_slope(_load(gate, row, column, gate_stride, mask), "silu")
        grad = _load(dy, row, column, C, mask)
        offset = row.to(tl.int64)[:, None] * C + column[None, :]
        tl.store(dgate + offset, (grad * total * slope).to(dgate.dtype.element_ty), mask=mask)
        grad *= weight
        tl.store(dx + offset, grad.to(dx.dtype.element_ty), mask=mask)
        tl.store(dz + offset, (grad * factor).to(dz.dtype.element_ty), mask=mask)
        collected += grad * skip
    tl.store(partial + tl.program_id(0).to(tl.int64) * C + column, tl.sum(collected, axis=0), mask=column < C)


def forward(x: Tensor, z: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    """Return the gated sum, contiguous; see `gated_skip`."""
    y = x.new_empty(x.shape, dtype=torch.promote_types(torch.promote_types(x.dtype, z.dtype), gate.dtype))
    x, z, gate = rows_of(x), rows_of(z), rows_of(gate)
    rows, columns = x.shape
    Launch(
        _forward_kernel,
        (-(-rows // ROWS), -(-columns // BLOCK)),
        (x, z, scale.contiguous(), gate, y, rows, x.stride(0), z.stride(0), gate.stride(0)),
        {"C": columns, "BLOCK": BLOCK, "ROWS": ROWS, "num_warps": WARPS},
    ).run()
    return y


def backward(x: Tensor, z: Tensor, scale: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x, z, the scale and the gate, all contiguous."""
    dx, dz, dgate = x.new_empty(x.shape), z.new_empty(z.shape), gate.new_empty(gate.shape)
    x, z, gate = rows_of(x), rows_of(z), rows_of(gate)
    rows, columns = x.shape
    tiles, blocks = -(-rows // ROWS), -(-columns // BLOCK)
    programs = min(tiles, max(1, MAX_PARTIALS // blocks))
    partial = x.new_empty((programs, columns), dtype=torch.float32)
    inputs = x, z, scale.contiguous(), gate, grad.contiguous()
    Launch(
        _backward_kernel,
        (programs, blocks),
        (*inputs, dx, dz, dgate, partial, rows, tiles, x.stride(0), z.stride(0), gate.stride(0)),
        {"C": columns, "BLOCK": BLOCK, "ROWS": ROWS, "num_warps": WARPS},
    ).run()
    return dx, dz, partial.sum(0).to(scale.dtype), dgate
