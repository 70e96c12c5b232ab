"""Log-decay -rate softplus(raw + bias): one program computes a block of rows and columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.triton.head_signals import softplus
from kalmix.layers.fused.triton.rows import rows_of
from kalmix.ops._shared.triton.compile_and_launch import Launch

FORWARD = {"BLOCK": 256, "ROWS": 8, "num_warps": 8}  # columns and rows of a tile
BACKWARD = {"BLOCK": 64, "ROWS": 16, "STAGES": 2, "num_warps": 4}
MAX_PARTIALS = 64  # programs of the backward pass per block of columns; each adds up gradients for its rows


@triton.jit(do_not_specialize=["rows"])
def step_decay_forward(
    x, bias, log_rate, y, rows, stride, C: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Compute the log-decays of a block of rows and columns."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < C, row.to(tl.int64)[:, None]
    mask = (row < rows)[:, None] & inside[None, :]
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(log_rate + column // KEYS, mask=inside, other=0.0).to(tl.float32))
    raw = tl.load(x + at * stride + column[None, :], mask=mask, other=0.0).to(tl.float32) + shift[None, :]
    tl.store(y + at * C + column[None, :], -rate[None, :] * softplus(raw), mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def step_decay_backward(
    x, bias, log_rate, dy, dx, partial, rows, tiles, stride,
    C: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the input, and add up those of bias and log-rate for the rows of a program."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(log_rate + column // KEYS, mask=inside, other=0.0).to(tl.float32))
    dbias, drate = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask, at = (row < rows)[:, None] & inside[None, :], row.to(tl.int64)[:, None]
        raw = tl.load(x + at * stride + column[None, :], mask=mask, other=0.0).to(tl.float32) + shift[None, :]
        grad = -rate[None, :] * tl.load(dy + at * C + column[None, :], mask=mask, other=0.0)
        drate += grad * softplus(raw)
        small = tl.exp(-tl.abs(raw))
        grad *= tl.where(raw > 0.0, 1.0, small) / (1.0 + small)  # sigmoid
        dbias += grad
        tl.store(dx + at * C + column[None, :], grad.to(dx.dtype.element_ty), mask=mask)
    at = partial + tl.program_id(0).to(tl.int64) * (2 * C) + column
    tl.store(at, tl.sum(dbias, axis=0), mask=inside)
    tl.store(at + C, tl.sum(drate, axis=0), mask=inside)


def forward(raw: Tensor, bias: Tensor, log_rate: Tensor) -> Tensor:
    """Return the log-decay in float32, contiguous."""
    y, x = raw.new_empty(raw.shape, dtype=torch.float32), rows_of(raw)
    rows, columns = x.shape
    options = FORWARD | {"C": columns, "KEYS": columns // log_rate.shape[0]}
    arguments = x, bias.contiguous(), log_rate.contiguous(), y, rows, x.stride(0)
    grid = -(-rows // FORWARD["ROWS"]), -(-columns // FORWARD["BLOCK"])
    Launch(step_decay_forward, grid, arguments, options).run()
    return y


def backward(raw: Tensor, bias: Tensor, log_rate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs."""
    dx, x = raw.new_empty(raw.shape), rows_of(raw)
    rows, columns = x.shape
    tiles = -(-rows // BACKWARD["ROWS"])
    programs = min(tiles, MAX_PARTIALS)
    partial = x.new_empty((programs, 2, columns), dtype=torch.float32)
    options = BACKWARD | {"C": columns, "KEYS": columns // log_rate.shape[0]}
    inputs = x, bias.contiguous(), log_rate.contiguous(), grad.contiguous()
    arguments = (*inputs, dx, partial, rows, tiles, x.stride(0))
    Launch(step_decay_backward, (programs, -(-columns // BACKWARD["BLOCK"])), arguments, options).run()
    dbias, drate = partial.sum(0).unbind(0)
    return dx, dbias.to(bias.dtype), drate.view(log_rate.shape[0], -1).sum(1).to(log_rate.dtype)
