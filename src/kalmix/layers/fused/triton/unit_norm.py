"""Division of vectors by their length: one program normalises a block of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.triton.rows import block_of_rows, split_rows
from kalmix.ops._shared.triton.compile_and_launch import Launch


@triton.jit
def inverse_length(square, eps, ON_LENGTH: tl.constexpr):
    """Return 1 / length and the factor of the gradient's part along the vector."""
    if ON_LENGTH:
        length = tl.sqrt(square)
        inverse, slope = 1.0 / (length + eps), tl.where(length > 0.0, 1.0 / length, 0.0)
    else:
        inverse = tl.rsqrt(square + eps)
        slope = inverse
    return inverse, slope


@triton.jit(do_not_specialize=["rows", "inner"])
def _forward_kernel(
    x, y, squares, rows, inner, outer_stride, inner_stride, scale, eps,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, ON_LENGTH: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, P)
    mask = (row < rows)[:, None] & (column < K)[None, :]
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride
    values = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    square = tl.sum(values * values, axis=1)
    inverse, _ = inverse_length(square, eps, ON_LENGTH)
    out = values * (scale * inverse)[:, None]
    tl.store(y + row.to(tl.int64)[:, None] * K + column[None, :], out.to(y.dtype.element_ty), mask=mask)
    tl.store(squares + row, square, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    y, squares, grad, dx, rows, scale, eps,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, ON_LENGTH: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, P)
    mask = (row < rows)[:, None] & (column < K)[None, :]
    offset = row.to(tl.int64)[:, None] * K + column[None, :]
    unit = tl.load(y + offset, mask=mask, other=0.0).to(tl.float32) / scale
    dy = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32) * scale
    inverse, slope = inverse_length(tl.load(squares + row, mask=row < rows, other=1.0), eps, ON_LENGTH)
    along = tl.sum(unit * dy, axis=1)
    out = inverse[:, None] * dy - (slope * along)[:, None] * unit
    tl.store(dx + offset, out.to(dx.dtype.element_ty), mask=mask)


def forward(x: Tensor, scale: float, eps: float, eps_on_length: bool) -> tuple[Tensor, Tensor]:
    """Return the scaled vectors, contiguous, and their squared lengths `[...]` in float32; see `l2_normalize`."""
    source = split_rows(x)
    y, squares = x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)
    inner, width = source.shape[1:]
    rows, options = source.shape[0] * inner, block_of_rows(width)
    Launch(
        _forward_kernel,
        (-(-rows // options["ROWS"]),),
        (source, y, squares, rows, inner, source.stride(0), source.stride(1), scale, eps),
        {"K": width, **options, "ON_LENGTH": eps_on_length},
    ).run()
    return y, squares


def backward(y: Tensor, squares: Tensor, grad: Tensor, scale: float, eps: float, eps_on_length: bool) -> Tensor:
    """Return the gradient of the vectors, contiguous."""
    dx, width = y.new_empty(y.shape), y.shape[-1]
    rows, options = squares.numel(), block_of_rows(width)
    Launch(
        _backward_kernel,
        (-(-rows // options["ROWS"]),),
        (y.contiguous(), squares.contiguous(), grad.contiguous(), dx, rows, scale, eps),
        {"K": width, **options, "ON_LENGTH": eps_on_length},
    ).run()
    return dx
