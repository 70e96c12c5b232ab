"""Common parts of the Triton kernels of steps."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def contiguous_width(x: Tensor) -> Tensor:
    """Return a signal `[B, 1, heads, width]`, copied unless the columns of a head are contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def row_strides(x: Tensor | None) -> tuple[int, int]:
    """Return the strides of batch and heads of a signal `[B, 1, heads, ...]`; 0 for a signal that is absent."""
    return (0, 0) if x is None else (x.stride(0), x.stride(2))


@triton.jit
def take_block(x, block, COLUMNS: tl.constexpr):
    """Return entries `block * COLUMNS` to `(block + 1) * COLUMNS - 1` of a vector whose size is a multiple of them."""
    BLOCKS: tl.constexpr = x.shape[0] // COLUMNS
    if BLOCKS == 1:
        part = x
    else:
        chosen = tl.arange(0, BLOCKS)[:, None] == block
        part = tl.sum(tl.where(chosen, tl.reshape(x, [BLOCKS, COLUMNS]), 0.0), 0)
    return part


def matrix_sizes(keys: int, width: int) -> dict[str, int]:
    """Return tile sizes and warps of a program that holds K x K matrices; they must not depend on the batch.

    Up to 128 keys a matrix is in registers. Above, it is read in blocks of `COLUMNS` columns. Columns are in strips of
    `STRIP`, so that few threads hold a row and exchange its sums. The K x V matrix is read in blocks of `VALUES`
    columns.
    """
    padded = max(16, triton.next_power_of_2(keys))
    return {
        "KEYS": padded,
        "COLUMNS": padded if padded <= 128 else 32,
        "STRIP": 16,
        "VALUES": min(max(16, triton.next_power_of_2(width)), 8192 // padded),
        "num_warps": {16: 1, 32: 2, 64: 4, 128: 8}.get(padded, 16),
    }
