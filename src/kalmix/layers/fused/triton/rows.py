"""Blocks of rows: sizes by rule from the width of a row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

BLOCK = 2048  # elements that one program holds, unless one row has more
ELEMENTS_PER_WARP = 256  # 8 a thread, 16 bytes in half precision


def block_of_rows(width: int) -> dict[str, Any]:
    """Return the padded width `P` of a row, the rows `ROWS` of a program, and its warps."""
    padded = 1 << (width - 1).bit_length()
    rows = max(1, BLOCK // padded)
    return {"P": padded, "ROWS": rows, "num_warps": max(1, min(16, padded * rows // ELEMENTS_PER_WARP))}


def split_rows(x: Tensor) -> Tensor:
    """Return `x` `[..., K]` as `[outer, inner, K]` with adjacent columns; copies it only if its strides require it."""
    return _adjacent(x).reshape(-1, x.shape[-2] if x.ndim > 1 else 1, x.shape[-1])


def rows_of(x: Tensor) -> Tensor:
    """Return `x` `[..., K]` as `[rows, K]` with adjacent columns; copies it only if its strides require it."""
    return _adjacent(x).reshape(-1, x.shape[-1])


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
