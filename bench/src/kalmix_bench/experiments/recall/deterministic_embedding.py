"""Embedding lookup with a deterministic gradient on GPUs.

A GPU adds the gradients of one row in varying order, and floating-point sums depend on it. PyTorch's deterministic sum
is slow if most tokens have one id, as in selective copying. Integer sums do not depend on the order, so gradients are
added as multiples of 2^-40 of the largest one. Tokens take turns with several copies of the table, so that few threads
wait to add to the same row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.ops._shared.custom_op import custom_op, once_differentiable

_BITS = 40  # bits of a gradient; 2^22 gradients of one row fit into 63 bits
_COPIES, _ROWS = 256, 1 << 16  # copies of the table, and rows of all copies, at most


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Return rows `[..., D]` of `table` `[V, D]`, float32, at `ids` `[...]`."""
    return _Lookup.apply(table, ids) if table.is_cuda else F.embedding(ids, table)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable("the deterministic embedding lookup", "a CPU")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,) = ctx.saved_tensors
        largest = grad.abs().amax()
        shift = _BITS - torch.frexp(largest).exponent.double()
        integers = (grad.double() * torch.exp2(shift)).round().long()
        sums = _added(integers.flatten(0, -2), ids.flatten(), ctx.rows)
        return (sums * torch.exp2(-shift)).to(grad.dtype) + 0 * largest, None  # NaN if a gradient is infinite


def _add_up(integers: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Return sums `[rows, D]` of integers `[n, D]` over the rows `ids` `[n]`, in any order."""
    copies = max(1, min(_COPIES, _ROWS // rows))
    turns = torch.arange(len(ids), device=ids.device) % copies
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        sums = integers.new_zeros(copies * rows, integers.shape[1]).index_add_(0, turns * rows + ids, integers)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return sums.view(copies, rows, -1).sum(0)


def _add_up_fake(integers: Tensor, ids: Tensor, rows: int) -> Tensor:
    return integers.new_empty(rows, integers.shape[1])


_added = custom_op("kalmix_bench::lookup_added", _add_up, _add_up_fake)
