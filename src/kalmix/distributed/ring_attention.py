"""Causal softmax attention in a ring: keys and values travel from rank to rank.

Each rank computes the attention of its queries to one block of keys at a time, and merges the results by the logarithms
of their sums of weights. Memory is that of the own tokens and two further blocks of keys and values. PyTorch's own ring
(`torch.distributed.tensor.experimental.context_parallel`) has no kernel for CPUs and takes no mask, so it supports
neither packed sequences nor these tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kalmix.distributed.attention_blocks import Merged, MergedGradient, Tile, group_rows
from kalmix.distributed.context import Call, active_call
from kalmix.distributed.ring import Pair, Ring
from kalmix.types import belief_dtype


def attend_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Compute causal softmax attention of this rank's queries to the keys of all ranks.

    Args:
        q: queries `[B, T, H, W]` of this rank.
        k, v: keys and values `[B, T, G, W]` of this rank. G divides H. Queries and keys are converted to the dtype of
            values.

    Returns:
        `[B, T, H, W]`, 0 outside all documents; `None` if no context is active, or it has no ring.
    """
    call: Call | None = active_call()
    if call is None or call.context.attention != "ring":
        return None
    call.participants += 1
    with torch.autocast(q.device.type, enabled=False):
        return call.context.uncompiled(_RingAttention.apply, q.to(v.dtype), k.to(v.dtype), v, call.ring(None))


def tiles_of(pairs: list[Pair], visits_itself: bool) -> list[Tile]:
    """Return tiles for pairs of runs. In its own run, a query sees earlier tokens only."""
    return group_rows(
        (query.row, query.start, query.stop, key.start, key.stop, visits_itself and query.past == key.past)
        for query, key in pairs
    )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        merged = Merged.of_no_keys(q)
        for source, (keys, values) in ring.visit([k, v]):
            merged.add(q, keys, values, tiles_of(ring.pairs[source], source == ring.rank))
        output = merged.output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, merged.log_weight_sum)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *merged = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad_q = q.new_zeros(q.shape, dtype=belief_dtype(q.dtype))
        gradient = MergedGradient(grad_output, q, *merged)

        def compute(source: int, block: list[Tensor]) -> list[Tensor]:
            keys, values = block
            return gradient.add(grad_q, keys, values, tiles_of(ring.pairs[source], source == ring.rank))

        grad_k, grad_v = ring.sum_gradients([k, v], compute)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None
