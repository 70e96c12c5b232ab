"""RMS norm with an optional gate or residual: one program normalises a block of rows.

A row is one group of columns of one token. Groups may share a weight or have one each; row i belongs to group
i % groups of the weight, and a program handles rows of one group.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.triton.activation import activation_and_slope
from kalmix.layers.fused.triton.rows import block_of_rows
from kalmix.ops._shared.triton.compile_and_launch import Launch

MAX_PARTIALS = 1024  # programs of the backward pass per group; each adds up gradients of the weight for its rows
MAX_PARTIAL_ELEMENTS = 1 << 20


@triton.jit
def _load_input(x, other, offset, mask, GATE: tl.constexpr, GATE_FIRST: tl.constexpr, ADDS: tl.constexpr):
    """Return the number that the norm receives, the input, and the gate with its slope and its own input."""
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    received, gate, slope = value, value, value
    if ADDS:
        received = value + tl.load(other + offset, mask=mask, other=0.0).to(tl.float32)
    if GATE != "none":
        gate, slope = activation_and_slope(tl.load(other + offset, mask=mask, other=0.0).to(tl.float32), GATE)
        if GATE_FIRST:
            received = value * gate
    return received, value, gate, slope


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x, other, weight, y, total, rows, eps,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, GATE_FIRST: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    group, column = tl.program_id(1), tl.arange(0, P)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * GROUPS + group
    mask = (row < rows)[:, None] & (column < N)[None, :]
    offset = row.to(tl.int64)[:, None] * N + column[None, :]
    received, _, gate, _ = _load_input(x, other, offset, mask, GATE, GATE_FIRST, ADDS)
    if ADDS:
        received = received.to(total.dtype.element_ty)
        tl.store(total + offset, received, mask=mask)
        received = received.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(received * received, axis=1) / N + eps)
    factor = tl.load(weight + group * N + column, mask=column < N, other=0.0).to(tl.float32)
    out = received * inverse[:, None] * factor[None, :]
    if GATE != "none" and not GATE_FIRST:
        out *= gate
    tl.store(y + offset, out.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    x, gate_input, weight, dy, dtotal, dx, dgate, partial, rows, tiles, eps,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, GATE_FIRST: tl.constexpr, ADDS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the input and the gate, and add up those of the weight over the rows of a program.

    With `ADDS`, x is the sum of `forward`, `dtotal` its other gradient, and `dgate` a copy of `dx` if `COPIES`.
    """
    group, column = tl.program_id(1), tl.arange(0, P)
    factor = tl.load(weight + group * N + column, mask=column < N, other=0.0).to(tl.float32)
    collected = tl.zeros((ROWS, P), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)) * GROUPS + group
        mask = (row < rows)[:, None] & (column < N)[None, :]
        offset = row.to(tl.int64)[:, None] * N + column[None, :]
        received, value, gate, slope = _load_input(x, gate_input, offset, mask, GATE, GATE_FIRST, False)
        inverse = tl.rsqrt(tl.sum(received * received, axis=1) / N + eps)[:, None]
        unit = received * inverse
        grad = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        if GATE != "none" and not GATE_FIRST:
            tl.store(dgate + offset, (grad * unit * factor[None, :] * slope).to(dgate.dtype.element_ty), mask=mask)
            grad *= gate
        collected += grad * unit
        grad *= factor[None, :]
        grad = inverse * (grad - unit * (tl.sum(grad * unit, axis=1) / N)[:, None])
        if ADDS:
            grad += tl.load(dtotal + offset, mask=mask, other=0.0).to(tl.float32)
        if GATE != "none" and GATE_FIRST:
            tl.store(dgate + offset, (grad * value * slope).to(dgate.dtype.element_ty), mask=mask)
            grad *= gate
        tl.store(dx + offset, grad.to(dx.dtype.element_ty), mask=mask)
        if COPIES:
            tl.store(dgate + offset, grad.to(dgate.dtype.element_ty), mask=mask)
    at = partial + (tl.program_id(0) * GROUPS + group) * N + column
    tl.store(at, tl.sum(collected, axis=0), mask=column < N)


class NormOptions(NamedTuple):
    """Columns normalised together, epsilon, activation of the gate ("none" without one), and whether it comes first."""

    width: int
    eps: float
    activation: str = "none"
    gate_first: bool = False


def forward(
    x: Tensor,
    other: Tensor | None,
    weight: Tensor,
    options: NormOptions,
    dtype: torch.dtype,
    total_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the norm.

    Args:
        x: `[..., E]`.
        other: the gate's input or, with `total_dtype`, the tensor to add to `x` first; in the shape of `x`.
        weight: `[width]` or `[E]`.
        options: see the class.
        dtype: dtype of the result.
        total_dtype: dtype of the sum of `x` and `other`.

    Returns:
        The result, and the sum (empty without `total_dtype`); both are contiguous.
    """
    y = x.new_empty(x.shape, dtype=dtype)
    total = x.new_empty(0) if total_dtype is None else x.new_empty(x.shape, dtype=total_dtype)
    rows = x.numel() // options.width
    groups, constants = _constants(weight.numel(), options, ADDS=total_dtype is not None)
    inputs = x.contiguous(), (x if other is None else other).contiguous(), weight.contiguous()
    Launch(
        _forward_kernel,
        (-(-(rows // groups) // constants["ROWS"]), groups),
        (*inputs, y, total, rows, options.eps),
        constants,
    ).run()
    return y, total


def backward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    grad: Tensor,
    options: NormOptions,
    total_grad: Tensor | None = None,
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients.

    Args:
        x: input of `forward`, or the sum.
        gate: input of the gate, or `None`.
        weight: as in `forward`.
        grad: gradient of the result.
        options: as in `forward`.
        total_grad: gradient of the sum, to which the norm's is added, or `None`.
        copy_dtype: dtype of a second copy of the gradient of x, if it is needed.

    Returns:
        Gradients of x, the gate (the copy or empty without one) and the weight.
    """
    rows = x.numel() // options.width
    groups, constants = _constants(weight.numel(), options, ADDS=total_grad is not None, COPIES=copy_dtype is not None)
    tiles = -(-(rows // groups) // constants["ROWS"])
    programs = min(tiles, MAX_PARTIALS, max(128, MAX_PARTIAL_ELEMENTS // weight.numel()))
    dx = x.new_empty(x.shape)
    if gate is None:
        dgate = x.new_empty(0 if copy_dtype is None else x.shape, dtype=copy_dtype)
    else:
        dgate = gate.new_empty(gate.shape)
    partial = x.new_empty((programs, *weight.shape), dtype=torch.float32)
    inputs = [y.contiguous() for y in (x, x if gate is None else gate, weight, grad)]
    dtotal = inputs[3] if total_grad is None else total_grad.contiguous()
    Launch(
        _backward_kernel,
        (programs, groups),
        (*inputs, dtotal, dx, dgate, partial, rows, tiles, options.eps),
        constants,
    ).run()
    return dx, dgate, partial.sum(0).to(weight.dtype)


@cache
def _constants(columns: int, options: NormOptions, **flags: bool) -> tuple[int, dict[str, Any]]:
    """Return the groups with a weight of their own, of `columns` in all, and constants of the kernels."""
    groups = columns // options.width
    constants = {"GROUPS": groups, "N": options.width, **block_of_rows(options.width)}
    return groups, constants | {"GATE": options.activation, "GATE_FIRST": options.gate_first} | flags
