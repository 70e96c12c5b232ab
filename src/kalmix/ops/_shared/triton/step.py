"""Common parts of the launches of steps."""

from __future__ import annotations

from torch import Tensor


def contiguous_width(x: Tensor) -> Tensor:
    """Return a signal `[B, 1, heads, width]`, copied unless the columns of a head are contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def row_strides(x: Tensor | None) -> tuple[int, int]:
    """Return the strides of batch and heads of a signal `[B, 1, heads, ...]`; 0 for a signal that is absent."""
    return (0, 0) if x is None else (x.stride(0), x.stride(2))
