"""Batches of small lower triangular matrices, several times faster on a CPU than with PyTorch's own functions."""

from __future__ import annotations

import torch
from torch import Tensor


def lower_triangle(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return `[..., L, L]` with zeros above a diagonal, like `torch.tril`."""
    return x * torch.ones(x.shape[-2:], dtype=x.dtype, device=x.device).tril(diagonal)


def solve_lower_triangular(factor: Tensor, right: Tensor, *, transposed: bool = False, unit: bool = False) -> Tensor:
    """Return L^-1 R or, if `transposed`, L'^-1 R.

    Args:
        factor: L, `[..., L, L]`, lower triangular.
        right: R, `[..., L, V]`.
        transposed: whether to solve with the transpose of `factor`.
        unit: whether to treat the diagonal of `factor` as ones.
    """
    matrix = factor if transposed else factor.mT  # the transposed problem has the memory layout that LAPACK needs
    rows = torch.linalg.solve_triangular(matrix, right.mT, upper=not transposed, left=False, unitriangular=unit)
    return rows.mT
