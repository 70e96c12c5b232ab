"""Matrix products for kernels with plain autograd, whose backward pass may be called under autocast.

PyTorch runs a backward pass under the autocast that is active where it is called, also if the forward pass ran without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.ops._shared.custom_op import needs_grad
from kalmix.types import without_autocast
from kalmix.validation import in_transform


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return the matrix product of `[..., M, K]` and `[..., K, N]`; autocast rounds none of its derivatives.

    It has derivatives of every order, in both modes. The leading axes of both factors must be the same.
    """
    return _apply(x, y, False)


def masked_product(weights: Tensor, y: Tensor) -> Tensor:
    """Return `product(weights, y)` for weights that are 0 where a row must not depend on a row of `y`.

    A row whose upstream gradient is not finite adds nothing to the gradient of `y`, since 0 times NaN is NaN. The
    gradient of its weights is not finite.
    """
    return _apply(weights, y, True)


def _apply(x: Tensor, y: Tensor, masked: bool) -> Tensor:
    if torch.compiler.is_compiling():
        return _Product.apply(x, y, masked)
    if in_transform():
        return _ProductWithJvp.apply(x, y, masked)
    return _EagerProduct.apply(x, y, masked) if needs_grad(x, y) else _multiply(x, y)


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return x @ y
    with without_autocast(x.device):
        return x @ y


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, y = ctx.saved_tensors
    grad_x = product(grad, y.mT) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return grad_x, None, None
    rows = torch.where(grad.isfinite().all(-1, keepdim=True), grad, 0) if ctx.masked else grad
    return grad_x, product(x.mT, rows), None


class _EagerProduct(torch.autograd.Function):
    """Product outside transforms. This form of a function takes less host time; `torch.func` needs the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, masked: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.masked = masked
        ctx.save_for_backward(x, y)
        return _multiply(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gradients(ctx, grad)


class _Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, masked: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _multiply(x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, y, ctx.masked = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gradients(ctx, grad)


class _ProductWithJvp(_Product):
    """`_Product` with forward-mode derivatives; torch.compile in torch 2.11 cannot trace a custom `jvp`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Product.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y = ctx.saved_tensors
        return product(x_tangent, y) + product(x, y_tangent)
