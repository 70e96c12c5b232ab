"""Solution of linear systems in float64: one program solves some columns of one system.

Gauss-Jordan elimination with partial pivoting. The matrix and the right side stay in registers. Rows are not exchanged:
each keeps its place, and the unknown that it solves for is stored.

On Hopper the same is CUDA C++, in cuda/solve.cu. Triton finds a row or a column of a matrix by a sum over all of it,
which takes several times as many instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.cuda import cuda_kernel
from kalmix.ops._shared.cuda import unsupported_gpu
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.widths import padded_width

COLUMNS = 32  # of the right side, in a program
MAX_WARPS = 32


@triton.jit(do_not_specialize=["columns"])
def _kernel(matrices, rights, solutions, columns, K: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    system = tl.program_id(0).to(tl.int64)
    row, other = tl.arange(0, SIZE), tl.arange(0, SIZE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (column < columns)[None, :]
    inside = (row < K)[:, None]
    matrix = tl.load(matrices + system * K * K + row[:, None] * K + other[None, :], inside & (other < K)[None, :], 0.0)
    right = tl.load(rights + system * K * columns + row[:, None] * columns + column[None, :], inside & exists, 0.0)
    unknown = tl.where(row < K, SIZE, -1)  # that a row solves for; SIZE: none yet; -1: the row does not exist
    for step in range(K):
        coefficient = tl.sum(tl.where((other == step)[None, :], matrix, 0.0), 1)
        size = tl.where(coefficient == coefficient, tl.abs(coefficient), float("inf"))  # also a row with NaN is chosen
        pivot = tl.argmax(tl.where(unknown == SIZE, size, -1.0), 0)
        chosen = row == pivot
        scale = 1.0 / tl.sum(tl.where(chosen, coefficient, 0.0), 0)
        matrix_row = tl.sum(tl.where(chosen[:, None], matrix, 0.0), 0) * scale
        right_row = tl.sum(tl.where(chosen[:, None], right, 0.0), 0) * scale
        matrix = tl.where(chosen[:, None], matrix_row[None, :], matrix - coefficient[:, None] * matrix_row[None, :])
        right = tl.where(chosen[:, None], right_row[None, :], right - coefficient[:, None] * right_row[None, :])
        unknown = tl.where(chosen, step, unknown)
    addresses = solutions + system * K * columns + unknown[:, None] * columns + column[None, :]
    tl.store(addresses, right, inside & exists)


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the solutions of systems with matrices `[N, K, K]` and right sides `[N, K, C]`, in float64."""
    matrix, right = matrix.contiguous(), right.contiguous()
    solution = right.new_empty(right.shape)
    systems, width, columns = right.shape
    kernel, constants = _kernel, {"K": width, "COLUMNS": COLUMNS}
    if matrix.is_cuda and unsupported_gpu(matrix.get_device()) is None:
        kernel = cuda_kernel("solve")
    else:
        size = padded_width(width)
        constants |= {"SIZE": size, "num_warps": min(MAX_WARPS, max(1, size * size // 512))}
    Launch(kernel, (systems, triton.cdiv(columns, COLUMNS)), (matrix, right, solution, columns), constants).run()
    return solution
