"""Parts whose output is computed again in the backward pass."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from forms import DEVICE, form
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from kalmix.layers.fused import swiglu, without_storing

pytest.importorskip("triton")


class Calls:
    """Count calls of `swiglu`, and whether its outputs are alive."""

    def __init__(self, x):
        self.x, self.outputs = x, []

    def __call__(self):
        y = swiglu(self.x)
        self.outputs.append(weakref.ref(y.untyped_storage()))
        return y

    @property
    def alive(self):
        gc.collect()  # launches in Triton's interpreter are circles of references
        return [x() is not None for x in self.outputs]


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(DEVICE)


def given():
    torch.manual_seed(1)
    return torch.randn(2, 5, 8, device=DEVICE).requires_grad_()


def test_output_is_freed_and_computed_again(linear):
    x = given()
    expected = torch.autograd.grad(linear(swiglu(x)).square().sum(), [x, *linear.parameters()])
    part = Calls(x)
    with form("triton"):
        y = without_storing(part, linear)
        assert part.alive == [False]
        found = torch.autograd.grad(y.square().sum(), [x, *linear.parameters()])
    assert len(part.outputs) == 2
    torch.testing.assert_close(found, expected)


def test_eager_form_and_inference_store_as_usual(linear):
    part = Calls(given())
    with form("eager"):
        y = without_storing(part, linear)
        assert part.alive == [True]
        y.sum().backward()
    with form("triton"), torch.no_grad():
        without_storing(part, linear)
    assert len(part.outputs) == 2


def test_second_derivatives(linear):
    def second(x, call):
        (grad,) = torch.autograd.grad(call(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *linear.parameters()])

    expected = second(given(), lambda x: linear(swiglu(x)))
    with form("triton"):
        found = second(given(), lambda x: without_storing(partial(swiglu, x), linear))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_autocast_of_the_forward_pass_is_used_again(linear):
    x, expected = given(), []
    dtypes = []

    def part():
        dtypes.append((torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE)))
        return swiglu(x).to(torch.bfloat16 if torch.is_autocast_enabled(DEVICE) else torch.float32)

    with form("triton"):
        with torch.autocast(DEVICE, torch.bfloat16):
            y, other = without_storing(part, linear), linear(part())
        expected = torch.autograd.grad(other.sum(), linear.weight)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), linear.weight), expected)
    assert dtypes == [(True, torch.bfloat16)] * 3


def test_modules_that_save_their_input_twice_and_nested_calls(linear):
    """An adapter beside a linear layer also saves its input; the inner call is inside the module of the outer one."""
    other = nn.Linear(4, 8).to(DEVICE)

    def inner(y):
        return without_storing(partial(swiglu, other(y) + y.repeat(1, 1, 2)), linear)

    parameters = [*linear.parameters(), *other.parameters()]
    x = given()
    expected = torch.autograd.grad(inner(swiglu(x)).square().sum(), [x, *parameters])
    with form("triton"):
        part = Calls(x)
        y = without_storing(part, inner)
        assert part.alive == [False]
        found = torch.autograd.grad(y.square().sum(), [x, *parameters])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["checkpoint", "offload"])
def test_other_hooks_stay_in_charge(linear, kind):
    part = Calls(given())
    with form("triton"):
        if kind == "offload":
            with save_on_cpu():
                y = without_storing(part, linear)
        else:
            y = checkpoint(lambda: without_storing(part, linear), use_reentrant=False)
        assert not hasattr(torch._C._autograd._top_saved_tensors_default_hooks(False), "__len__")
        y.sum().backward()
    assert len(part.outputs) == (1 if kind == "offload" else 2)
    expected = torch.autograd.grad(linear(swiglu(part.x)).sum(), part.x)[0]
    torch.testing.assert_close(part.x.grad, expected)
