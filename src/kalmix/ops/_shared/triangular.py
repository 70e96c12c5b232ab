"""Lower triangles, many and small: what PyTorch's own functions for them cost on a CPU several times over."""

from __future__ import annotations

import torch
from torch import Tensor


def lower(x: Tensor, diagonal: int = 0) -> Tensor:
    """`[..., L, L]` with 0 above a diagonal, as `tril`."""
    return x * torch.ones(x.shape[-2:], dtype=x.dtype, device=x.device).tril(diagonal)


def solve_lower(factor: Tensor, right: Tensor, *, transposed: bool = False, unit: bool = False) -> Tensor:
    """factor^-1 right, or factor^-1' right: `[..., L, L]` and `[..., L, V]`, as rows, which LAPACK takes as they lie.

    `unit` takes the diagonal for 1.
    """
    matrix = factor if transposed else factor.mT
    rows = torch.linalg.solve_triangular(matrix, right.mT, upper=not transposed, left=False, unitriangular=unit)
    return rows.mT
