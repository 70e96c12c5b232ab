"""Launches of the kernels of head signals. The number of columns and shared memory determine the sizes of tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from kalmix.layers.fused.dispatch import STEP_ROWS
from kalmix.layers.fused.triton.head_signals import (
    head_signals_backward,
    head_signals_forward,
    head_signals_gradients,
    head_signals_step,
)
from kalmix.layers.fused.triton.rows import rows_of
from kalmix.ops._shared.gpu import shared_memory
from kalmix.ops._shared.triton.compile_and_launch import Launch

FORWARD = {"BM": 64, "BD": 128, "num_warps": 4, "num_stages": 3}  # tokens and input columns of a tile
BACKWARD = {"BM": 64, "BD": 128, "num_warps": 8, "num_stages": 3}
GRADIENT_ROWS = 64  # tokens of a program of `head_signals_gradients`
PROGRAMS = 264  # of the backward pass, about two for each multiprocessor of an H100; their sums are stored
STEP = {"NB": 4, "MAX_BD": 1024, "num_warps": 4}  # columns and input columns of its tile
KINDS = {"": 0, "sigmoid": 1, "squared": 2, "softplus": 3, "decay": 4, "decay-step": 5}


class Groups(NamedTuple):
    """Parameters of the groups of columns, each a tuple with one entry per group.

    Attributes:
        weights: `[columns, D]`, or `None` without the group.
        biases: `[columns]` or `None`.
        log_rates: `[columns]` or `None`; for group 0 `[columns * E]`.
        kinds: keys of `KINDS`.
        constants: scale or lower bound of each group.
    """

    weights: Sequence[Tensor | None]
    biases: Sequence[Tensor | None]
    log_rates: Sequence[Tensor | None]
    kinds: Sequence[str]
    constants: Sequence[float]

    def sizes(self) -> list[int]:
        """Return the number of columns of each group."""
        return [0 if w is None else w.shape[0] for w in self.weights]

    def constexprs(self, width: int) -> dict[str, Any]:
        """Return the constants of all kernels."""
        found: dict[str, Any] = {"D": width}
        for i, (size, kind, rate) in enumerate(zip(self.sizes(), self.kinds, self.log_rates, strict=True)):
            found |= {f"N{i}": size, f"K{i}": KINDS[kind], f"R{i}": rate is not None}
        return found


def _fill(tensors: Sequence[Tensor | None], other: Tensor) -> list[Tensor]:
    """Replace `None` by a tensor that the kernel does not read."""
    return [other if x is None else x.contiguous() for x in tensors]


def _dot_columns(total: int) -> int:
    return max(16, 1 << (total - 1).bit_length())


def _forward_tile(columns: int, weights: Sequence[Tensor], limit: int) -> dict[str, int]:
    """Return the options of `head_signals_forward` for `columns` padded columns and `limit` bytes of shared memory."""
    stored = len(weights) * columns * weights[0].element_size()  # each group has a tile of its own

    def bytes_of(rows: int, width: int, stages: int) -> int:
        return (stages - 1) * width * (2 * rows + stored) + 2 * width * (rows + columns)

    return _fit(FORWARD | ({"num_warps": 8} if columns > 64 else {}), bytes_of, limit)


def _backward_tile(columns: int, limit: int) -> dict[str, int]:
    """Return the options of `head_signals_backward`; the arguments are those of `_forward_tile`."""

    def bytes_of(rows: int, width: int, stages: int) -> int:
        operands = 2 * (rows * width + rows * columns + width * columns)
        return (stages - 1) * 2 * rows * (width + columns) + operands + 2**14

    return _fit(BACKWARD, bytes_of, limit)


def _fit(options: dict[str, int], bytes_of: Callable[[int, int, int], int], limit: int) -> dict[str, int]:
    """Reduce stages and input columns of a tile until it fits into shared memory."""
    widths = [options["BD"] >> i for i in range(3)]
    sizes = [(width, stages) for width in widths for stages in range(options["num_stages"], 1, -1)]
    width, stages = next((x for x in sizes if bytes_of(options["BM"], *x) <= limit), sizes[-1])
    return options | {"BD": width, "num_stages": stages}


def forward(x: Tensor, groups: Groups, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Compute the signals.

    Args:
        x: tokens `[..., D]`.
        groups: groups of columns.
        dtype: dtype of the operands of products.

    Returns:
        The signals of three groups, `[..., columns]` or empty; steps of the group "decay-step", or empty; and the
        inputs of all activations, `[rows, all columns]`. All are float32.
    """
    tokens, sizes, width = rows_of(x), groups.sizes(), x.shape[-1]
    rows, first = tokens.shape[0], groups.log_rates[0]
    keys = 1 if first is None else first.numel() // sizes[0]
    shapes = [(*x.shape[:-1], n) if n else (0,) for n in sizes]
    if keys > 1:
        shapes[0] = (*shapes[0], keys)
    steps = next((shape for shape, kind in zip(shapes, groups.kinds, strict=True) if kind == "decay-step"), (0,))
    outputs = [x.new_empty(shape, dtype=torch.float32) for shape in (*shapes, steps, (rows, sum(sizes)))]
    parts = (groups.weights, groups.biases, groups.log_rates)
    inputs = [tensor for part in parts for tensor in _fill(part, tokens)]
    constants = groups.constexprs(width) | {f"B{i}": bias is not None for i, bias in enumerate(groups.biases)}
    if rows <= STEP_ROWS:
        options = {"NB": STEP["NB"], "BD": min(STEP["MAX_BD"], max(32, 1 << (width - 1).bit_length()))}
        options |= {"E": keys, "EP": 1 << (keys - 1).bit_length(), "num_warps": STEP["num_warps"]}
        grid = (rows, -(-sum(sizes) // STEP["NB"]))
        arguments = (tokens, *inputs, *outputs, tokens.stride(0), *groups.constants)
        Launch(head_signals_step, grid, arguments, constants | options).run()
    else:
        padded = _dot_columns(sum(sizes))
        tile = _forward_tile(padded, [w for w in groups.weights if w is not None], shared_memory(x.device))
        options = tile | {"NP": padded, **_precision(dtype)}
        arguments = (tokens, *inputs, *outputs, rows, tokens.stride(0), *groups.constants)
        Launch(head_signals_forward, (-(-rows // tile["BM"]),), arguments, constants | options).run()
    return tuple(outputs)


def backward(
    x: Tensor, groups: Groups, raw: Tensor, grads: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute gradients.

    Args:
        x: as in `forward`.
        groups: as in `forward`; biases are not read.
        raw: last result of `forward`.
        grads: gradients of three groups and of the steps, or `None`.
        dtype: dtype of the operands of products.

    Returns:
        The gradient of x, and in one vector those of all weights, inputs of activations, and log-rates.
    """
    tokens, width, total = rows_of(x), x.shape[-1], raw.shape[1]
    rows, padded = tokens.shape[0], _dot_columns(total)
    tile = _backward_tile(padded, shared_memory(x.device))
    tiles, blocks, summands = -(-rows // tile["BM"]), -(-width // tile["BD"]), -(-rows // GRADIENT_ROWS)
    programs = min(tiles, max(1, PROGRAMS // blocks))
    dx, draw = x.new_empty(x.shape), x.new_empty((rows, padded), dtype=dtype)
    sums = x.new_empty((summands, 2, total), dtype=torch.float32)
    partial = x.new_empty((programs, total * (width + 2)), dtype=torch.float32)
    constants = groups.constexprs(width) | {"NP": padded}
    options = {name: grad is not None for name, grad in zip(("G0", "G1", "G2", "GS"), grads, strict=True)}
    options |= {name: value for name, value in constants.items() if name != "D"} | {"BM": GRADIENT_ROWS}
    arguments = (raw, *_fill(groups.log_rates, raw), *_fill(grads, raw), draw, sums, rows, *groups.constants)
    Launch(head_signals_gradients, (summands,), arguments, options).run()
    options = {name: value for name, value in constants.items() if name[0] in "DN"} | tile | _precision(dtype)
    inputs = (tokens, *_fill(groups.weights, tokens), draw, sums)
    arguments = (*inputs, dx, partial, rows, tiles, summands, tokens.stride(0))
    Launch(head_signals_backward, (programs, blocks), arguments, options).run()
    return dx, partial[0] if programs == 1 else partial.sum(0)


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of products: the dtype of operands, and whether to convert them back to float32."""
    dtypes = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return {"DOT": dtypes[dtype], "EXACT": knobs.runtime.interpret}
