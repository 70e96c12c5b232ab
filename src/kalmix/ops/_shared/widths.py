"""Widths of blocks in kernels. They are also needed where Triton is not installed."""

from __future__ import annotations


def padded_width(width: int) -> int:
    """Return the number of rows of a block that holds a matrix of `width` rows: a power of two, at least 16."""
    return max(16, 1 << (int(width) - 1).bit_length())
