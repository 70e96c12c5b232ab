"""Matrix products of kernels with plain autograd: derivatives of every order, autocast, and NaN upstream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from kalmix.ops._shared.products import masked_product, product

Factors = tuple[Tensor, Tensor]


def factors(dtype: torch.dtype = torch.float64) -> Factors:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 4, generator=draw, dtype=dtype), torch.randn(2, 4, 5, generator=draw, dtype=dtype)
    return x.requires_grad_(), y.requires_grad_()


@pytest.mark.parametrize("function", [product, masked_product])
def test_derivatives_of_every_order(function):
    inputs = factors()
    assert torch.equal(function(*inputs), inputs[0] @ inputs[1])
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_transforms():
    x, y = (z.detach() for z in factors())
    mapped = torch.func.vmap(torch.func.grad(lambda x, y: product(x, y).square().sum()), (0, None))(x, y[0])
    torch.testing.assert_close(mapped, 2 * (x @ y[0]) @ y[0].mT)
    hessian = torch.func.hessian(lambda x: product(x, y).square().sum())(x)
    expected = torch.func.hessian(lambda x: (x @ y).square().sum())(x)
    torch.testing.assert_close(hessian, expected)


def test_first_and_second_derivatives_leave_autocast():
    def derivatives(enabled: bool) -> list[Tensor]:
        inputs = factors(torch.float32)
        result = product(*inputs).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            first = torch.autograd.grad(result, inputs, create_graph=True)
            second = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), inputs)
        return [*first, *second]

    assert all(map(torch.equal, derivatives(True), derivatives(False)))


def test_a_masked_row_with_nan_upstream_adds_nothing():
    weights, y = factors()
    with torch.no_grad():
        weights[:, 0] = 0
    upstream = torch.ones(2, 3, 5, dtype=torch.float64)
    upstream[:, 0, 2] = torch.nan
    grad_weights, grad_y = torch.autograd.grad(masked_product(weights, y), (weights, y), upstream)
    torch.testing.assert_close(grad_y, (weights.mT @ torch.ones_like(upstream)).detach())
    assert grad_weights[:, 0].isnan().all() and grad_weights[:, 1:].isfinite().all()
