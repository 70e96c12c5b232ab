"""Tests of `ridge` with ill-conditioned systems: large keys, small ridges and long sums; overflow gives NaN."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import pytest
import torch
from torch import Tensor

from kalmix.beliefs import RidgeBelief
from kalmix.ops import Adaptive, Chebyshev, ConjugateGradient, Exact, Fixed, Sketch
from kalmix.ops._ridge.linear_solvers import cholesky_factor
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Ridge, Solver
from kalmix.types import Filtered

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIGNALS = ("q", "k", "v", "log_decay", "gain")
EPS = torch.finfo(torch.float32).eps
LENGTHS = {"chunked": 70, "reference": 18}  # the first are two chunks; both are more tokens than keys have entries
SYSTEMS = {  # ridge, norm of keys, and the ridge after it is raised in float32
    "large keys": (Fixed(0.25), 1e3, Fixed(0.25)),
    "larger keys": (Fixed(0.25), 1e6, Adaptive(EPS)),
    "small ridge": (Adaptive(1e-9), 1.0, Adaptive(EPS)),
    "tiny keys": (Fixed(1e-20), 1e-4, Adaptive(EPS)),
    "well-conditioned": (Adaptive(0.02), 1e6, Adaptive(0.02)),
}


def signals(length: int, width: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Return float64 signals: two heads, unit queries, keys of norm `scale`, half of them close to each other."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(1, length, 2, width), dim=-1) for _ in range(2))
    k[:, 1::2] = k[:, :1] + 1e-3 * k[:, 1::2]
    gates = {"log_decay": -0.1 * normal(1, length, 2).exp(), "gain": normal(1, length, 2).sigmoid()}
    found = {"q": q, "k": scale * k, "v": normal(1, length, 2, width + 3)} | gates
    return {name: x.float().double().to(DEVICE) for name, x in found.items()}


def run(kernel: str, x: dict[str, Tensor], strength: Ridge, solver: Solver) -> Filtered:
    function = import_module(f"kalmix.ops._ridge.{kernel}").ridge
    shape = (1, 2, x["k"].shape[3])
    belief = RidgeBelief(*(x["gain"].new_zeros(*shape, n) for n in (x["v"].shape[3], x["k"].shape[3])))
    return function(RidgeSignals(*(x[name] for name in SIGNALS), None), belief, None, True, strength, solver)


def answers(kernel: str, x: dict[str, Tensor], strength: Ridge, solver: Solver) -> dict[str, Tensor]:
    """Return the mean, the variance and the gradients of the sum of all means, in float64."""
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    found = run(kernel, leaves, strength, solver)
    assert found.variance is not None
    grads = torch.autograd.grad(found.mean.sum(), list(leaves.values()))
    named = {"mean": found.mean, "variance": found.variance} | dict(zip(leaves, grads, strict=True))
    return {name: y.detach().double() for name, y in named.items()}


@cache
def exact_answers(length: int, scale: float, strength: Ridge) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return signals in float32, and the answers to them in float64."""
    x = signals(length, 16, scale)
    return {name: y.float() for name, y in x.items()}, answers("chunked", x, strength, Exact())


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("solver", [Exact(), ConjugateGradient(150), Sketch(16, Exact())], ids=str)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_ill_conditioned_systems_are_solved_with_a_raised_ridge(kernel, system, solver):
    """The ridge is eps ||H||_F and rounding changes H by half of that, so solutions may have a relative error of 1/2.

    Gradients of gates are sums with cancellation.
    """
    strength, scale, raised = SYSTEMS[system]
    x, want = exact_answers(LENGTHS[kernel], scale, raised)
    got = answers(kernel, x, strength, solver)
    for name, y in want.items():
        assert error(got[name], y) < (2 if name in ("log_decay", "gain") else 0.5), name


@pytest.mark.parametrize("solver", [Exact(), ConjugateGradient(150), Chebyshev(30)], ids=str)
@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_huge_keys_give_finite_results(kernel, solver):
    for strength, raised in ((Fixed(0.25), Adaptive(EPS)), (Adaptive(0.02), Adaptive(0.02))):
        x, want = exact_answers(LENGTHS[kernel], 1e9, raised)
        got = answers(kernel, x, strength, solver)
        assert all(bool(y.isfinite().all()) for y in got.values())
        unconverged = isinstance(solver, Chebyshev) and isinstance(
            strength, Fixed
        )  # 30 iterations at condition number 8e6
        assert error(got["mean"], want["mean"]) < (1.0 if unconverged else 0.5)


@pytest.mark.parametrize("solver", [Chebyshev(30), ConjugateGradient(30), Sketch(8), Sketch(8, Exact())], ids=str)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_unconverged_solutions_are_bounded(kernel, system, solver):
    strength, scale, raised = SYSTEMS[system]
    x, want = exact_answers(LENGTHS[kernel], scale, raised)
    got = answers(kernel, x, strength, solver)
    for name, y in want.items():
        assert float(got[name].norm()) < 3 * float(y.norm()), name


@pytest.mark.parametrize("solver", [Chebyshev(30), ConjugateGradient(30)], ids=str)
@pytest.mark.parametrize("system", ["large keys", "small ridge"])
def test_triton_solves_ill_conditioned_systems(system, solver):
    strength, scale, _ = SYSTEMS[system]
    x = signals(20, 8, scale)
    for dtype in (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,):
        rounded = {name: y.to(dtype if name in "qkv" else torch.float32) for name, y in x.items()}
        want = answers("chunked", {name: y.double() for name, y in rounded.items()}, strength, Exact())
        got = answers("custom_op", rounded, strength, solver)
        for name, y in want.items():
            assert float(got[name].norm()) < 10 * float(y.norm()), (name, dtype)


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
@pytest.mark.slow
def test_converged_conjugate_gradient_does_not_change(kernel):
    x = {name: y.float() for name, y in signals(LENGTHS[kernel], 16).items()}
    unconverged, many = (answers(kernel, x, Fixed(0.25), ConjugateGradient(n)) for n in (30, 200))
    for name, y in unconverged.items():
        assert error(many[name], y) < 1e-6, name


def test_cholesky_factor_exists_for_slightly_indefinite_matrices():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(5, 12, 12, generator=generator))[0]
    least = torch.tensor([1.0, 0.0, -1e-6, -1e-5, -1e-4])
    values = torch.cat([least[:, None].expand(5, 6), torch.ones(5, 6)], 1)
    matrix = (basis * values[:, None]) @ basis.mT
    factor = cholesky_factor(matrix.to(DEVICE)).cpu()
    assert bool(factor.isfinite().all())
    assert error(factor @ factor.mT, matrix) < 1e-3
    assert error((factor @ factor.mT)[0], matrix[0]) < 1e-6


@pytest.mark.parametrize("solver", [Chebyshev(30), ConjugateGradient(30), Exact()], ids=str)
@pytest.mark.parametrize("strength", [Fixed(0.25), Adaptive(0.02)], ids=str)
@pytest.mark.parametrize("kernel", ["reference", "chunked", "custom_op"])
def test_overflow_gives_nan(kernel, strength, solver):
    """||H||^2 exceeds the range of float32: the mean is NaN, not 0."""
    if kernel == "custom_op" and isinstance(solver, Exact):
        return
    x = {name: y.float() for name, y in signals(12, 4, 1e11).items()}
    found = run(kernel, x, strength, solver)
    assert bool(found.mean[:, 2:].isnan().all())
    assert found.variance is not None and bool(found.variance[:, 2:].isnan().all())
