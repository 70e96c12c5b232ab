"""Causal softmax attention to blocks of keys, by PyTorch's fused kernels.

Each block gives an output and the logarithms of its sums of weights, by which outputs of several blocks are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kalmix.types import belief_dtype

QUERY_TILE = 256  # queries of a tile, where PyTorch has no fused kernel
_CPU, _FLASH, _CUDNN = (
    f"_scaled_dot_product_{name}" for name in ("flash_attention_for_cpu", "flash_attention", "cudnn_attention")
)


class Tile(NamedTuple):
    """Range of queries that attends to a range of keys, in some rows of a batch.

    If `causal`, both ranges have the same length, and a query attends to its own key and to earlier ones only.

    Adjacent rows are a slice, since the host would wait for a GPU to index it with a list.
    """

    rows: list[int] | slice
    queries: slice
    keys: slice
    causal: bool


Rectangle = tuple[int, int, int, int, int, bool]  # batch row, first and end query, first and end key, causal


def group_rows(rectangles: Iterable[Rectangle]) -> list[Tile]:
    """Return tiles of queries and keys; those that differ in their batch row only are one tile."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, *extent in rectangles:
        groups.setdefault(tuple(extent), []).append(row)
    return [
        Tile(_adjacent(rows), slice(a, b), slice(c, d), bool(causal)) for (a, b, c, d, causal), rows in groups.items()
    ]


def _adjacent(rows: list[int]) -> list[int] | slice:
    return slice(rows[0], rows[-1] + 1) if rows == list(range(rows[0], rows[-1] + 1)) else rows


class Merged(NamedTuple):
    """Attention of queries to the blocks of keys so far.

    Attributes:
        output: `[B, T, H, W]`, 0 for queries without keys; float32, or float64 for float64 queries.
        log_weight_sum: logarithm of the sum of weights, `[B, T, H]`, like `output`; minus infinity without keys.
    """

    output: Tensor
    log_weight_sum: Tensor

    @classmethod
    def of_no_keys(cls, q: Tensor) -> Merged:
        """Return the attention of queries `[B, T, H, W]` to no keys."""
        output = q.new_zeros(q.shape, dtype=belief_dtype(q.dtype))
        return cls(output, output.new_full(q.shape[:3], -torch.inf))

    def add(self, q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile]) -> None:
        """Add tiles of queries `[B, T, H, W]` and of keys and values `[B, S, G, W]`, in place."""
        for rows, queries, keys, causal in tiles:
            at = rows, queries
            part, log_part = attend_block(q[at], k[rows, keys], v[rows, keys], causal)
            before = self.log_weight_sum[at]
            total = torch.logaddexp(before, log_part)
            scale, share = ((x - total).exp()[..., None] for x in (before, log_part))
            self.output[at] = self.output[at] * scale + part * share
            self.log_weight_sum[at] = total


class MergedGradient(NamedTuple):
    """Attention of queries to all blocks, and the gradient of its output.

    Attributes:
        grad_output: `[B, T, H, W]`.
        q: queries, like `grad_output`.
        output: the merged output in the dtype of `q`.
        log_weight_sum: of the merged output, `[B, T, H]`.
    """

    grad_output: Tensor
    q: Tensor
    output: Tensor
    log_weight_sum: Tensor

    def add(self, grad_q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile]) -> list[Tensor]:
        """Add contributions of tiles to the gradient of queries, in place; return the gradients of keys and values."""
        grads = [x.new_zeros(x.shape, dtype=grad_q.dtype) for x in (k, v)]
        for rows, queries, visible, causal in tiles:
            at = rows, queries
            own = self.grad_output[at], self.q[at], k[rows, visible], v[rows, visible]
            found = attend_block_backward(*own, self.output[at], self.log_weight_sum[at], causal)
            grad_q[at] += found[0]
            for grad, x in zip(grads, found[1:], strict=True):
                grad[rows, visible] += x
        return grads


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Tensor:
    """Compute softmax attention of tiles of queries to tiles of keys.

    Args:
        q: queries `[B, T, H, W]`.
        k, v: keys and values `[B, S, G, W]`. G divides H.
        tiles: the queries and their keys. The keys of a query may be in several tiles.

    Returns:
        `[B, T, H, W]`, 0 for queries without keys.
    """
    return _TileAttention.apply(q, k, v, tiles)  # pyright: ignore[reportReturnType]


class _TileAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        merged = Merged.of_no_keys(q)
        merged.add(q, k, v, tiles)
        output = merged.output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, merged.log_weight_sum)
        ctx.tiles = tiles
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *merged = ctx.saved_tensors
        grad_q = q.new_zeros(q.shape, dtype=belief_dtype(q.dtype))
        grad_k, grad_v = MergedGradient(grad_output, q, *merged).add(grad_q, k, v, ctx.tiles)
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
    if kernel := _fused_kernel(q, k.shape[1]):
        output, log_weight_sum = _fused_forward(kernel, query, key, value, causal)
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
    """Compute the contributions of a block to the gradients of q, k and v.

    Args:
        grad_output: `[N, L, H, W]`.
        q, k, v, causal: as in `attend_block`.
        output: output over all blocks, `[N, L, H, W]`.
        log_weight_sum: logarithm of the sum of weights over all blocks, `[N, L, H]`.
    """
    query, key, value = _by_heads(q, k, v)
    grad_out, out = (x.transpose(1, 2) for x in (grad_output, output))
    log_weight_sum = log_weight_sum.transpose(1, 2)
    kernel = _fused_kernel(q, k.shape[1])
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


def has_fused_kernel(q: Tensor) -> bool:
    """Return whether PyTorch has a fused kernel for queries like these that returns sums of weights."""
    return _fused_kernel(q, 1) is not None


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


def _fused_kernel(q: Tensor, keys: int) -> str | None:
    """Return the name of PyTorch's fused attention for queries and a number of keys, if it returns sums of weights."""
    if q.device.type == "cpu":
        return _CPU
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[3] % 8 or q.shape[3] > 256:
        return None
    if keys > 1 and q.shape[3] <= 128 and _prefers_cudnn(q.device):  # PyTorch refuses cuDNN for a single key
        return _CUDNN
    return _FLASH if torch.backends.cuda.is_flash_attention_available() else None


def _prefers_cudnn(device: torch.device) -> bool:
    """Return whether cuDNN's kernels are there and faster than flash attention, as on Hopper and newer GPUs."""
    enabled = torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
    if torch.are_deterministic_algorithms_enabled():  # PyTorch refuses cuDNN's attention then
        return False
    return enabled and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def _fused_forward(kernel: str, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output `[N, H, L, W]` and the logarithm of the sum of weights `[N, H, L]`."""
    forward = getattr(torch.ops.aten, kernel)
    if kernel == _CUDNN:
        output, log_weight_sum = forward(query, key, value, None, True, 0.0, causal)[:2]
        return output, log_weight_sum.view(query.shape[:3])
    # Beside the arguments of both kernels, that of CUDA has `return_debug_mask`, which is false by default.
    return forward(query, key, value, 0.0, causal)[:2]


def _fused_backward(kernel: str, inputs: tuple[Tensor, ...], causal: bool) -> list[Tensor]:
    """Return the gradients of query, key and value."""
    backward = getattr(torch.ops.aten, f"{kernel}_backward")
    if kernel == _CPU:
        return list(backward(*inputs, 0.0, causal))
    lengths, seed = (inputs[1].shape[2], inputs[2].shape[2]), inputs[0].new_empty(2, dtype=torch.uint64)
    if kernel == _CUDNN:
        *tensors, log_weight_sum = inputs
        no_dropout = seed, seed.new_empty(())
        return list(backward(*tensors, log_weight_sum[..., None], *no_dropout, None, None, None, *lengths, 0.0, causal))
    return list(backward(*inputs, None, None, *lengths, 0.0, causal, seed, seed.new_empty(())))
