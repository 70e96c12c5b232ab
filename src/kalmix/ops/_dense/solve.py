"""Batches of linear systems in float64, solved by one kernel on a GPU.

`torch.linalg.solve` makes the host wait for the device, which a CUDA graph cannot record.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher
from kalmix.ops._shared.environment import HAS_TRITON
from kalmix.validation import in_transform

DEVICES = ("cuda",)  # tests replace it by ("cpu",), where Triton's interpreter runs the kernel
MAX_WIDTH = 128  # rows of a matrix that one program holds


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the solution X of A X = R.

    The host does not wait for the device, so a singular matrix raises no error: its solutions are not finite.

    Args:
        matrix: A, float64 `[..., K, K]`, invertible.
        right: R, float64 `[..., K, C]`. Batch axes broadcast.

    Returns:
        `[..., K, C]`.

    Complexity: O(K^2 (K + C)) per matrix.
    """
    batch = torch.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])
    matrix, right = (x.expand(*batch, *x.shape[-2:]) for x in (matrix, right))
    uses_triton = matrix.device.type in DEVICES and HAS_TRITON and matrix.shape[-1] <= MAX_WIDTH and right.numel() > 0
    if not uses_triton or in_transform():
        return torch.linalg.solve_ex(matrix, right)[0]
    return _solve(*(x.reshape(-1, *x.shape[-2:]) for x in (matrix, right))).view(right.shape)


def _forward_fake(matrix, right):
    return right.new_empty(right.shape)


def _forward(matrix: Tensor, right: Tensor) -> Tensor:
    from kalmix.ops._dense.triton.solve import solve

    return solve(matrix, right)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    matrix, solution = ctx.saved_tensors
    right_grad = _solve(matrix.mT, grad)
    return -right_grad @ solution.mT if ctx.needs_input_grad[0] else None, right_grad


_op = custom_op("kalmix::solve", with_launch_cache(_forward), _forward_fake)
torch.library.register_autograd(_op, _backward, setup_context=_setup)
_solve = without_dispatcher(_op, _setup, _backward)
