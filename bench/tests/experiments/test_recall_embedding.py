"""A gradient added up in whole numbers is the gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kalmix_bench.experiments.recall.deterministic_embedding import _added, _Lookup


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e-35, 1e30, 0.0])
def test_the_gradient_of_a_lookup_is_that_of_an_embedding(size: float) -> None:
    torch.manual_seed(0)
    table, ids = torch.randn(5, 8, requires_grad=True), torch.randint(4, (3, 50))
    grad = size * torch.randn(3, 50, 8).exp()
    rows = _Lookup.apply(table, ids)
    assert torch.equal(rows, F.embedding(ids, table))
    (ours,) = torch.autograd.grad(rows, table, grad)
    exact = torch.zeros(5, 8, dtype=torch.float64).index_add(0, ids.flatten(), grad.double().flatten(0, 1))
    torch.testing.assert_close(ours.double(), exact, rtol=1e-7, atol=0)
    turned = torch.autograd.grad(_Lookup.apply(table, ids.flip(0, 1)), table, grad.flip(0, 1))[0]
    assert torch.equal(ours, turned)


def test_non_finite_gradients_stay_non_finite() -> None:
    table = torch.randn(2, 3, requires_grad=True)
    for bad in (float("inf"), float("nan")):
        grad = torch.tensor([[1.0, bad, 1.0]])
        (ours,) = torch.autograd.grad(_Lookup.apply(table, torch.tensor([1])), table, grad)
        assert not ours.isfinite().all()


def test_it_compiles_in_one_graph() -> None:
    table, ids = torch.randn(5, 8, requires_grad=True), torch.randint(5, (3, 4))
    read = torch.compile(_Lookup.apply, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(read(table, ids).square().sum(), table)
    (theirs,) = torch.autograd.grad(F.embedding(ids, table).square().sum(), table)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_the_registered_op_is_sound(device: str) -> None:
    whole, ids = torch.arange(12, device=device).view(4, 3), torch.tensor([1, 0, 1, 2], device=device)
    torch.library.opcheck(torch.ops.kalmix_bench.lookup_added.default, (whole, ids, 5))
    assert _added(whole, ids, 5)[1].tolist() == [6, 8, 10]
