"""Matrix products of kernels with plain autograd: derivatives of every order, and autocast."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from kalmix.ops._shared.products import product

Factors = tuple[Tensor, Tensor]


def factors(dtype: torch.dtype = torch.float64) -> Factors:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 4, generator=draw, dtype=dtype), torch.randn(2, 4, 5, generator=draw, dtype=dtype)
    return x.requires_grad_(), y.requires_grad_()


def test_derivatives_of_every_order():
    inputs = factors()
    assert torch.equal(product(*inputs), inputs[0] @ inputs[1])
    assert gradcheck(product, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(product, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


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
