"""Division of vectors by their length."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.layers.fused.derivatives import register_gradients
from kalmix.layers.fused.dispatch import uses_triton
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher
from kalmix.types import belief_dtype


def l2_normalize(x: Tensor, scale: float = 1.0, eps: float = 1e-6, *, eps_on_length: bool = False) -> Tensor:
    """Scale vectors to length `scale`, computed in float32; a zero vector stays zero.

        y = scale x / sqrt(|x|^2 + eps),   or with `eps_on_length`   y = scale x / (|x| + eps)

    Args:
        x: `[..., K]`, K columns that are scaled together. May be a view of a wider tensor.
        scale: length of the result.
        eps: small number that avoids a division by 0.
        eps_on_length: add `eps` to the length instead of its square.

    Returns:
        `[..., K]` in the dtype of `x`.

    Complexity: O(1) per element. Training stores the result and one float32 per vector.

    Example:
        >>> from kalmix.layers.fused import l2_normalize
        >>> l2_normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), scale=2.0)
        tensor([[1.2000, 1.6000],
                [0.0000, 0.0000]])
    """
    if uses_triton("l2_normalize", x, x.shape[-1]):
        return _l2_normalize(x, scale, eps, eps_on_length)[0]
    wide = x.to(belief_dtype(x.dtype))
    if eps_on_length:
        y = wide / (torch.linalg.vector_norm(wide, dim=-1, keepdim=True) + eps)
    else:
        y = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (y if scale == 1.0 else y * scale).to(x.dtype)


class UnitNorm(NamedTuple):
    """Unit norm of queries and keys in each head, in float32; see `l2_normalize`.

    Attributes:
        width: K, columns of a head; 0 for no norm.
        query_length: length of the queries; keys get length 1.
        eps: small number that avoids a division by 0.
        eps_on_length: add `eps` to the length instead of its square.
    """

    width: int = 0
    query_length: float = 1.0
    eps: float = 1e-6
    eps_on_length: bool = False

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scale queries and keys `[..., K]`."""
        q = l2_normalize(q, self.query_length, self.eps, eps_on_length=self.eps_on_length)
        return q, l2_normalize(k, eps=self.eps, eps_on_length=self.eps_on_length)


class QueryKeyColumns(NamedTuple):
    """Columns of queries and keys among channels: first the queries, then the keys, then the values.

    Attributes:
        keys: columns of the queries, and of the keys.
        norm: unit norm of their heads; by default none.
    """

    keys: int = 0
    norm: UnitNorm = UnitNorm()

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split channels `[..., C]` into queries, keys and values."""
        q, k, v = x.split([self.keys, self.keys, x.shape[-1] - 2 * self.keys], dim=-1)
        return q, k, v

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scale the heads of queries and keys `[..., keys]`, if they have a norm."""
        if self.norm.width:
            heads = -1, self.norm.width
            q, k = (y.flatten(-2) for y in self.norm.apply(q.unflatten(-1, heads), k.unflatten(-1, heads)))
        return q, k


def _forward_fake(x, scale, eps, eps_on_length):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _forward(x: Tensor, scale: float, eps: float, eps_on_length: bool) -> tuple[Tensor, Tensor]:
    """Return the scaled vectors, and their squared lengths `[...]` before scaling."""
    from kalmix.layers.fused.triton.unit_norm import forward

    return forward(x, scale, eps, eps_on_length)


def _backward_fake(y, squares, grad, scale, eps, eps_on_length):
    return y.new_empty(y.shape)


def _backward(y: Tensor, squares: Tensor, grad: Tensor, scale: float, eps: float, eps_on_length: bool) -> Tensor:
    from kalmix.layers.fused.triton.unit_norm import backward

    return backward(y, squares, grad, scale, eps, eps_on_length)


_l2_normalize_op = custom_op("kalmix::l2_normalize", with_launch_cache(_forward), _forward_fake)
_l2_normalize_backward = without_dispatcher(
    custom_op("kalmix::l2_normalize_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.options = inputs[1:]


def _gradients(ctx: Any, grad: Tensor | None, squares_grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    if squares_grad is not None:  # the second backward pass through `_differentiable_gradients`
        return _differentiable_gradients(ctx, grad, squares_grad)
    return None if grad is None else _l2_normalize_backward(*ctx.saved_tensors, grad, *ctx.options), None, None, None


def _differentiable_gradients(
    ctx: Any, grad: Tensor | None, squares_grad: Tensor | None
) -> tuple[Tensor, None, None, None]:
    """Compute the gradient from both outputs, through which autograd reaches the input."""
    saved, squares = ctx.saved_tensors  # gradient checkpointing allows only one access
    scale, eps, eps_on_length = ctx.options
    y, square = saved.float(), squares[..., None]
    if eps_on_length:
        length = torch.where(square > 0, square, 1).sqrt()
        inverse, slope = torch.where(square > 0, 1 / (length + eps), 1 / eps), 1 / length  # y is 0 where length is 0
    else:
        inverse = torch.rsqrt(square + eps)
        slope = inverse
    result = torch.zeros_like(y)
    if grad is not None:
        result = scale * inverse * grad - slope * y * (y * grad).sum(-1, keepdim=True) / scale
    if squares_grad is not None:
        result = result + 2 * squares_grad[..., None] * y / (scale * inverse)
    return result.to(saved.dtype), None, None, None


_l2_normalize = register_gradients(_l2_normalize_op, _setup, _gradients, _differentiable_gradients)
