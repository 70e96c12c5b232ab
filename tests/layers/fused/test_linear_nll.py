"""Loss of each target under a linear head: both forms against the composition of PyTorch's functions."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from forms import form
from test_cross_entropy import FORMS, SHAPES, problem
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kalmix.layers.fused import cross_entropy, linear_nll

module = sys.modules["kalmix.layers.fused.linear_nll"]  # the package has a function of this name


def composed(hidden, weight, targets, bias=None, cap=None):
    logits = F.linear(hidden, weight, bias)
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)


def differentiated(loss, tensors, targets, cap, scale=1.0) -> list[Tensor]:
    """Return the losses, and gradients of their sum with random factors."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    value = loss(*leaves[:2], targets, *leaves[2:], **({} if cap is None else {"cap": cap}))
    factors = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1), dtype=value.dtype)
    return [value, *torch.autograd.grad(value, leaves, scale * factors.to(value.device))]


@pytest.mark.parametrize(("biased", "cap"), [(False, None), (True, 1.5), (False, 1.5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("shape", "width", "words"), SHAPES)
def test_equals_the_composition(shape, width, words, name, dtype, biased, cap, monkeypatch):
    """Chunks have two tokens of 37 float32 words. In half precision, errors are those of the composition."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 300)
    *tensors, targets = problem(shape, width, words, dtype)
    targets.view(-1)[0] = words - 1
    tensors = tensors if biased else tensors[:2]
    exact = differentiated(composed, [x.double() for x in tensors], targets, cap)
    with form(name):
        found = differentiated(linear_nll, tensors, targets, cap)
    assert [x.dtype for x in found] == [torch.promote_types(dtype, torch.float32), *(x.dtype for x in tensors)]
    usual = differentiated(composed, tensors, targets, cap)
    for x, y, truth in zip(found, usual, exact, strict=True):
        assert x.shape == truth.shape
        rounding = torch.finfo(dtype).eps * truth.abs().max().clamp(min=1)
        assert (x - truth).abs().max() <= 2 * (y - truth).abs().max() + 16 * rounding


@pytest.mark.parametrize("cap", [None, 1.5])
def test_second_derivatives(cap):
    *tensors, targets = problem((3,), 2, 5, torch.float64)
    leaves = [x.cpu().requires_grad_() for x in tensors]
    assert torch.autograd.gradgradcheck(lambda h, w, b: linear_nll(h, w, targets.cpu(), b, cap), leaves)


def test_small_upstream_gradients_do_not_underflow():
    """Targets share a loss that is divided by their number; float16 has no numbers below 6e-8."""
    *tensors, targets = problem(dtype=torch.float16)
    exact = differentiated(composed, [x.float() for x in tensors], targets, None, 2**-17)
    found = differentiated(linear_nll, tensors, targets, None, 2**-17)
    assert (found[1].float() - exact[1]).norm() < 0.05 * exact[1].norm()


def test_no_targets_and_no_gradients():
    hidden, weight, _, targets = problem()
    assert linear_nll(hidden[:0], weight, targets[:0]).shape == (0, 5)
    empty = linear_nll(hidden[:0].requires_grad_(), weight, targets[:0]).sum()
    empty.backward()
    assert not linear_nll(hidden, weight, targets).requires_grad
    assert (linear_nll(hidden, weight, torch.full_like(targets, -100)) == 0).all()


def test_a_checkpoint_computes_the_losses_once(monkeypatch):
    """A checkpoint around it repeats only the steps before the head, whose logits are computed forward and backward."""
    calls = []
    score = cross_entropy.score_chunks
    monkeypatch.setattr(module, "score_chunks", lambda *given: (calls.append(given[-1] is not None), score(*given)))
    hidden, weight, _, targets = problem()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = checkpoint(lambda h, w: linear_nll(torch.tanh(h), w, targets), *leaves, use_reentrant=False).sum()
    found = torch.autograd.grad(loss, leaves)
    assert len(calls) == 2
    torch.testing.assert_close(found, torch.autograd.grad(composed(torch.tanh(hidden), weight, targets).sum(), leaves))
