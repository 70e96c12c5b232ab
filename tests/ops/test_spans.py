"""Spans of long sequences: gradients, modes and transforms of `filter_in_spans`, and how many a rank has.

Laws of all ops are in test_updates.py.
"""

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from kalmix import KernelError, PointBelief, ops, updates
from kalmix.ops._dense.block_sizes import count_spans
from kalmix.ops._shared.span_filter import SpanCall
from kalmix.testing.tolerances import relative_error


def gated(dtype=torch.float64, length=12):
    """Return the op `delta`, `filter_in_spans` with 3 spans, and their arguments."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, 1, 4, dtype=torch.float64).to(dtype) for _ in range(3))
    signals = {"k": torch.nn.functional.normalize(k, dim=-1), "v": v, "gain": torch.rand(2, length, 1).to(dtype)}
    return ops.delta, partial(updates.filter_in_spans, "delta", spans=3), {"q": q, **signals}


def test_spans_have_the_gradients_that_are_asked_for():
    """The prior alone or a few inputs may need gradients; under `no_grad`, the op runs without autograd."""
    op, in_spans, given = gated()
    prior = PointBelief(torch.randn(2, 1, 4, 4, dtype=torch.float64))
    for learned in (("mean",), ("gain",), ("mean", "k")):
        grads = []
        for function in (op, in_spans):
            tensors = given | {"mean": prior.mean}
            leaves = {x: tensors[x].detach().requires_grad_() for x in learned}
            arguments = tensors | leaves
            found = function(belief=PointBelief(arguments.pop("mean")), **arguments)
            loss = found.mean.cos().sum() + found.belief.mean.sin().sum()
            grads.append(torch.autograd.grad(loss, list(leaves.values())))
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    modes, run = [], SpanCall.run
    with torch.no_grad(), patch.object(SpanCall, "run", lambda *x: (modes.append(torch.is_grad_enabled()), run(*x))[1]):
        found = in_spans(**{name: x.requires_grad_() for name, x in given.items()})
    assert modes == [False] and not found.mean.requires_grad


def test_spans_refuse_what_their_backward_pass_cannot_do():
    _, in_spans, given = gated()
    gain = given["gain"].requires_grad_()
    with pytest.raises(KernelError, match="first derivatives only"):
        torch.autograd.grad(in_spans(**given).mean.sum(), gain, create_graph=True)
    loss = in_spans(**given).mean.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


def test_spans_in_half_precision_are_as_exact_as_the_op():
    op, in_spans, exact_arguments = gated(length=48)
    errors = {}
    for function in (op, in_spans):
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            given = {name: x.to(torch.bfloat16).to(dtype).requires_grad_() for name, x in exact_arguments.items()}
            mean = function(**given).mean
            results.append([mean, *torch.autograd.grad(mean.double().cos().sum(), list(given.values()))])
        errors[function] = [relative_error(x, y) for x, y in zip(results[1], results[0], strict=True)]
    for own, other in zip(errors[in_spans], errors[op], strict=True):
        assert own < 1.5 * other  # room for the order of sums; both round the same tensors


@pytest.mark.parametrize("transform", ["compile", "vmap"])
def test_spans_compile_and_take_part_in_transforms(transform):
    op, in_spans, given = gated()

    def mean(q):
        return in_spans(**(given | {"q": q})).mean

    if transform == "compile":
        found = torch.compile(mean, backend="eager", fullgraph=True)(given["q"])
    else:
        found = torch.func.vmap(mean)(given["q"][None])[0]
    torch.testing.assert_close(found, op(**given).mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "ranks", "expected"),
    [
        ((1, 32768, 8, 128), 2, 4),
        ((1, 16384, 8, 128), 4, 2),  # passing beliefs from span to span costs as much as more spans save
        ((1, 8192, 8, 128), 8, 1),
        ((4, 32768, 8, 128), 2, 2),  # 64 sequential programs
        ((8, 32768, 16, 128), 2, 1),
        ((1, 32770, 8, 128), 2, 2),  # does not divide by 4
    ],
)
def test_ranks_cut_long_sequences_with_few_heads(shape, ranks, expected):
    values = SimpleNamespace(shape=shape, is_cuda=True)
    assert count_spans(values, ranks) == expected
    assert count_spans(torch.empty(shape, device="meta"), ranks) == 1
