"""Causal softmax attention in a ring: keys and values travel from rank to rank.

Each rank computes the attention of its queries to one block of keys at a time, and merges the results by the logarithms
of their sums of weights. Memory is that of the own tokens and two further blocks of keys and values. PyTorch's own ring
(`torch.distributed.tensor.experimental.context_parallel`) has no kernel for CPUs and takes no mask, so it supports
neither packed sequences nor these tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kalmix.distributed.context import Call, active_call
from kalmix.distributed.ring import Pair, Ring
from kalmix.types import belief_dtype

QUERY_TILE = 256  # queries of a tile, where PyTorch has no fused kernel


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


class Tile(NamedTuple):
    """Rows of a batch that attend to the same range of keys: `queries` of this rank, `keys` of the visited block.

    Adjacent rows are a slice, since the host would wait for a GPU to index it with a list.
    """

    rows: list[int] | slice
    queries: slice
    keys: slice
    causal: bool


def tiles_of(pairs: list[Pair], visits_itself: bool) -> list[Tile]:
    """Group pairs of runs that differ in their batch row only. In its own run, a query sees earlier tokens only."""
    groups: dict[tuple[int, int, int, int, bool], list[int]] = {}
    for query, key in pairs:
        causal = visits_itself and query.past == key.past
        groups.setdefault((query.start, query.stop, key.start, key.stop, causal), []).append(query.row)
    return [Tile(_adjacent(rows), slice(a, b), slice(c, d), causal) for (a, b, c, d, causal), rows in groups.items()]


def _adjacent(rows: list[int]) -> list[int] | slice:
    return slice(rows[0], rows[-1] + 1) if rows == list(range(rows[0], rows[-1] + 1)) else rows


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        output = q.new_zeros(q.shape, dtype=belief_dtype(q.dtype))
        log_weight_sum = output.new_full(q.shape[:3], -torch.inf)
        for source, (keys, values) in ring.visit([k, v]):
            for rows, queries, visible, causal in tiles_of(ring.pairs[source], source == ring.rank):
                at = rows, queries
                part, log_part = attend_block(q[at], keys[rows, visible], values[rows, visible], causal)
                before = log_weight_sum[at]
                total = torch.logaddexp(before, log_part)
                scale, share = ((x - total).exp()[..., None] for x in (before, log_part))
                output[at] = output[at] * scale + part * share
                log_weight_sum[at] = total
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, log_weight_sum)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, output, log_weight_sum = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad_q = q.new_zeros(q.shape, dtype=belief_dtype(q.dtype))

        def compute(source: int, block: list[Tensor]) -> list[Tensor]:
            grads = [x.new_zeros(x.shape, dtype=grad_q.dtype) for x in block]
            for rows, queries, visible, causal in tiles_of(ring.pairs[source], source == ring.rank):
                at = rows, queries
                keys, values = (x[rows, visible] for x in block)
                own = grad_output[at], q[at], keys, values, output[at], log_weight_sum[at]
                found = attend_block_backward(*own, causal)
                grad_q[at] += found[0]
                for grad, x in zip(grads, found[1:], strict=True):
                    grad[rows, visible] += x
            return grads

        grad_k, grad_v = ring.sum_gradients([k, v], compute)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention to a block of keys.

    Args:
        q: `[N, L, H, W]`.
        k, v: `[N, S, G, W]`. G divides H.
        causal: whether query i attends to keys 0 to i only; then S = L.

    Returns:
        The output `[N, L, H, W]`, and the logarithm of the sum of weights `[N, L, H]`, the latter in float32 (float64
        for float64 inputs).
    """
    query, key, value = _by_heads(q, k, v)
    if kernel := _fused_kernel(q):
        # Beside the arguments of both kernels, that of CUDA has `return_debug_mask`, which is false by default.
        output, log_weight_sum = getattr(torch.ops.aten, kernel)(query, key, value, 0.0, causal)[:2]
        return output.transpose(1, 2), log_weight_sum.transpose(1, 2).to(belief_dtype(q.dtype))
    outputs, sums = [], []
    for start in range(0, q.shape[1], QUERY_TILE):
        scores = _scores(query, key, start, causal)
        sums.append(scores.logsumexp(-1))
        outputs.append((scores - sums[-1][..., None]).exp() @ value.to(scores.dtype))
    return torch.cat(outputs, 2).transpose(1, 2), torch.cat(sums, 2).transpose(1, 2)


def attend_block_backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_weight_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the shares of a block in the gradients of q, k and v.

    Args:
        grad_output: `[N, L, H, W]`.
        q, k, v, causal: as in `attend_block`.
        output: output over all blocks, `[N, L, H, W]`.
        log_weight_sum: logarithm of the sum of weights over all blocks, `[N, L, H]`.
    """
    query, key, value = _by_heads(q, k, v)
    grad_out, out = (x.transpose(1, 2) for x in (grad_output, output))
    log_weight_sum = log_weight_sum.transpose(1, 2)
    kernel = _fused_kernel(q)
    if kernel:
        inputs = (grad_out.contiguous(), query, key, value, out.contiguous(), log_weight_sum.contiguous())
        grads = _fused_backward(kernel, inputs, causal)
    else:
        dtype = belief_dtype(q.dtype)
        grads = [x.new_zeros(x.shape, dtype=dtype) for x in (query, key, value)]
        delta = (grad_out.to(dtype) * out).sum(-1, keepdim=True)
        for start in range(0, q.shape[1], QUERY_TILE):
            rows = slice(start, start + QUERY_TILE)
            weights = (_scores(query, key, start, causal) - log_weight_sum[:, :, rows, None]).exp()
            upstream = grad_out[:, :, rows].to(dtype)
            grad_scores = weights * (upstream @ value.to(dtype).mT - delta[:, :, rows]) * q.shape[3] ** -0.5
            grads[0][:, :, rows] = grad_scores @ key.to(dtype)
            grads[1] += grad_scores.mT @ query[:, :, rows].to(dtype)
            grads[2] += weights.mT @ upstream
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    shared = k.shape[2], q.shape[2] // k.shape[2]
    return grad_q, grad_k.unflatten(2, shared).sum(3), grad_v.unflatten(2, shared).sum(3)


def _by_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values `[N, H, L, W]` with one head of keys for each head of queries."""
    copies = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(copies, 2) if copies > 1 else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, k, v


def _scores(query: Tensor, key: Tensor, start: int, causal: bool) -> Tensor:
    """Return the scores of one tile of queries, beginning at `start`."""
    dtype = belief_dtype(query.dtype)
    tile = query[:, :, start : start + QUERY_TILE].to(dtype)
    scores = tile @ key.to(dtype).mT * query.shape[3] ** -0.5
    if not causal:
        return scores
    earlier = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(start)
    return scores.masked_fill(~earlier, -torch.inf)


def _fused_kernel(q: Tensor) -> str | None:
    """Return the name of PyTorch's fused attention for these queries, if it has one that returns sums of weights."""
    if q.device.type == "cpu":
        return "_scaled_dot_product_flash_attention_for_cpu"
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    if q.is_cuda and half and torch.backends.cuda.is_flash_attention_available():
        return "_scaled_dot_product_flash_attention"
    return None


def _fused_backward(kernel: str, inputs: tuple[Tensor, ...], causal: bool) -> list[Tensor]:
    """Return the gradients of query, key and value."""
    backward = getattr(torch.ops.aten, f"{kernel}_backward")
    if kernel.endswith("_for_cpu"):
        return list(backward(*inputs, 0.0, causal))
    lengths, seed = (inputs[1].shape[2], inputs[2].shape[2]), inputs[0].new_empty(2, dtype=torch.uint64)
    return list(backward(*inputs, None, None, *lengths, 0.0, causal, seed, seed.new_empty(())))
