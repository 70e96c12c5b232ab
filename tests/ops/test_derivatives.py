"""Derivatives beyond first-order reverse mode: every kernel computes them or raises `KernelError`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from histories import arguments, signals
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from kalmix.errors import KernelError
from kalmix.ops import OPS, ConjugateGradient, Dynamics, Exact, Sketch, attend, attend_radial, dense, ridge
from kalmix.ops._ridge.solvers import Chebyshev
from kalmix.ops._shared.kernel import TRANSFORMS
from kalmix.ops.experimental import attend_channels, attend_corotating
from kalmix.testing.cases import cases, outputs
from kalmix.testing.measure import differentiable

PAGE = Path(__file__).parents[2] / "docs" / "derivatives.md"


def _dense(v: Tensor, **options: Any) -> Tensor:
    q, noise = torch.ones(1, 6, 1, 3).cumsum(1) / 6, torch.ones(1, 6, 1)
    return dense(q, q, v, obs_noise=noise, process_noise=noise, **options).mean


def test_docs_page_lists_derivatives_of_each_kernel():
    rows = re.findall(r"^\| (`.*`) \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    expected = {True: ("yes",) * 4, False: ("yes", "raises", "raises", "raises")}
    kernels = [kernel for op in OPS.values() for kernel in op.kernels]
    assert set(listed) == {kernel.name for kernel in kernels}
    assert all(listed[kernel.name] == expected[TRANSFORMS in kernel.features] for kernel in kernels)


@pytest.mark.parametrize("inputs_ask", [False, True], ids=["upstream alone", "inputs too"])
def test_create_graph_raises_kernel_error(inputs_ask):
    scale = torch.ones((), requires_grad=True)
    v = torch.ones(1, 6, 1, 2, requires_grad=True)
    read = _dense(v, kernel="chunked")
    loss = (read * scale).sum() if not inputs_ask else (read * scale).square().sum() + v.square().sum()
    with pytest.raises(KernelError, match=r"'chunked' of `dense`.*create_graph=True.*kernel='reference'"):
        torch.autograd.grad(loss, v, create_graph=True)


def test_backward_with_retain_graph_can_be_repeated():
    v = torch.ones(1, 6, 1, 2, requires_grad=True)
    loss = _dense(v, kernel="chunked").sum()
    first, second = (torch.autograd.grad(loss, v, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", [x for x in cases(["cpu"], (torch.float32,)) if not x.interpreted], ids=str)
def test_backward_passes_leave_autocast(case):
    """PyTorch runs a backward pass under the autocast that is active where it is called."""
    case = case.with_changes(length=40 if case.kernel == "chunked" else 6)
    inputs = case.inputs()
    leaves = {name: x.requires_grad_() for name, x in differentiable(inputs).items()}
    _assert_leaves_autocast(outputs(case.run(inputs)), leaves)


@pytest.mark.parametrize(
    "solver", [Chebyshev(backward="unrolled"), ConjugateGradient(), Exact(), Sketch(4)], ids=lambda x: type(x).__name__
)
def test_backward_passes_of_solvers_leave_autocast(solver):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 6, 2, 8, generator=draw).requires_grad_() for _ in range(3))
    found = ridge(q, k, v, solver=solver, variance=True, kernel="reference")
    assert found.variance is not None
    _assert_leaves_autocast([found.mean, found.variance, *found.belief], {"q": q, "k": k, "v": v})


def _assert_leaves_autocast(answers: list[Tensor], leaves: dict[str, Tensor]) -> None:
    answers = [x for x in answers if x.requires_grad]
    upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) for x in answers]
    expected = torch.autograd.grad(answers, list(leaves.values()), upstream, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(answers, list(leaves.values()), upstream)
    for name, x, y in zip(leaves, got, expected, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.slow
def test_transforms_select_a_kernel_that_supports_them():
    v = torch.randn(1, 40, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, noise = torch.ones(1, 40, 1, 3, dtype=torch.float64) / 2, torch.ones(1, 40, 1, dtype=torch.float64)

    def loss(v: Tensor) -> Tensor:
        return dense(q, q, v, obs_noise=noise, process_noise=noise).mean.square().sum()

    leaf = v.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(v), want)
    torch.testing.assert_close(torch.func.jvp(loss, (v,), (v,))[1], (want * v).sum())
    torch.testing.assert_close(torch.func.vmap(loss)(torch.stack([v, 2 * v])), torch.stack([loss(v), loss(2 * v)]))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(v, v))).tangent
    torch.testing.assert_close(tangent, (want * v).sum())


@pytest.mark.slow
def test_compiled_transforms_raise_or_are_right():
    v = torch.ones(1, 3, 1, 2)
    slope = torch.compile(lambda x: torch.func.jvp(_dense_sum, (x,), (x,))[1], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(slope(v), torch.func.jvp(_dense_sum, (v,), (v,))[1])
    torch.compiler.reset()


def _dense_sum(v: Tensor) -> Tensor:
    q, noise = torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1)
    return dense(q, q, v, obs_noise=noise, process_noise=noise).mean.square().sum()


def test_unrolled_solver_raises_for_missing_derivatives():
    q = torch.ones(1, 3, 1, 2).cumsum(1).requires_grad_()

    def loss(q: Tensor) -> Tensor:
        return OPS["ridge"].function(q, q, q, solver=Chebyshev(5, backward="unrolled")).mean.sum()

    with pytest.raises(KernelError, match=r"unrolled.*implicit"):
        torch.autograd.grad(loss(q), q, create_graph=True)
    with pytest.raises(KernelError, match=r"unrolled.*implicit"):
        torch.func.jvp(loss, (q.detach(),), (q.detach(),))


def _two_noises(x: dict[str, Any]) -> dict[str, Any]:
    both = ("process_noise", "key_noise", "query_noise", "nu", "temperature")
    return x | {name: torch.stack([x[name], x[name] / 2], 1) for name in both}


def _corotating(**x: Any) -> Any:
    names = ("q", "k", "v")
    rest = {name: y for name, y in x.items() if name not in (*names, "floor")}
    q, k, v = (x[name] for name in names)
    return attend_corotating(q, k, v, v.flip(1), kernel="reference", **rest)


def _two_sided(**x: Any) -> Any:
    return attend(**x, causal=False, kernel="reference")


def _two_sided_own(**x: Any) -> Any:
    own = Dynamics(*(x[name].flip(0) for name in Dynamics._fields))
    return attend(**x, value_dynamics=own, weight="exponential", causal=False, kernel="reference")


FORMS = {
    "two-sided": (_two_sided, lambda x: x),
    "two-sided, values of their own": (_two_sided_own, lambda x: x),
    "channels": (attend_channels, lambda x: x),
    "radial": (attend_radial, _two_noises),
    "corotating": (_corotating, _two_noises),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_attend_have_second_derivatives(form):
    function, change = FORMS[form]
    x = change(arguments(signals(4, groups=1, per_channel=form == "channels")))
    names = [name for name, y in x.items() if isinstance(y, Tensor) and y.is_floating_point() and name != "times"]
    at = {name: x[name].detach().double() for name in names}
    generator = torch.Generator().manual_seed(1)
    along = {name: 0.1 * torch.randn(y.shape, generator=generator, dtype=torch.float64) for name, y in at.items()}

    def curve(
        step: Tensor,
    ) -> Tensor:  # one step for the frequency, one for the other inputs
        moved = {name: at[name] + step[0 if name == "frequency" else 1] * along[name] for name in names}
        found = function(**(x | moved), variance=True)
        return found.mean.sum() + found.variance.log().sum()

    steps = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(curve, (steps,), check_forward_ad=True)
    assert gradgradcheck(curve, (steps,))


@pytest.mark.parametrize("form", FORMS)
def test_backward_passes_of_forms_of_attend_leave_autocast(form):
    function, change = FORMS[form]
    x = change(arguments(signals(4, groups=1, per_channel=form == "channels")))
    x = {name: y.float() if isinstance(y, Tensor) and name != "times" else y for name, y in x.items()}
    leaves = {name: x[name].detach().requires_grad_() for name in "qkv"}
    found = function(**(x | leaves), variance=True)
    _assert_leaves_autocast([found.mean, found.variance], leaves)
