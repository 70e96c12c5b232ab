"""Rows of a table by their ids, with a gradient that is the same again on a GPU, too.

A GPU adds up what many tokens ask of one row in the order in which they come, and floating point sums depend on it;
PyTorch's deterministic sum takes a third of a second where most tokens are one id, as in selective copying. Whole
numbers do not depend on the order: gradients are added up as multiples of 2^-40 of the largest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.ops._shared.custom_op import custom_op, once_differentiable

_BITS = 40  # of a gradient; a row may be asked for 2^22 times before 63 are full


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `[..., D]` of `table` `[V, D]`, float32, at `ids` `[...]`."""
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
        whole = (grad.double() * torch.exp2(shift)).round().long()
        sums = _added(whole.flatten(0, -2), ids.flatten(), ctx.rows)
        return (sums * torch.exp2(-shift)).to(grad.dtype) + 0 * largest, None  # NaN where that is infinite


def _add_up(whole: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Sums `[rows, D]` of whole numbers `[n, D]` that go to the rows `ids` `[n]`, in any order."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return whole.new_zeros(rows, whole.shape[1]).index_add_(0, ids, whole)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _add_up_fake(whole: Tensor, ids: Tensor, rows: int) -> Tensor:
    return whole.new_empty(rows, whole.shape[1])


_added = custom_op("kalmix_bench::lookup_added", _add_up, _add_up_fake)
