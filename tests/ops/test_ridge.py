"""Tests of `ridge`: solvers, gradients, and memories that are 0."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kalmix import ArgumentError, KernelError, designs, oracle
from kalmix.beliefs import RidgeBelief
from kalmix.ops import Adaptive, Chebyshev, ConjugateGradient, Exact, Fixed, Sketch, dense, ridge
from kalmix.ops._ridge.dense_solve import _Unrolled
from kalmix.ops._ridge.linear_solvers import Matrices, chebyshev
from kalmix.types import Filtered

KERNELS = ("chunked", "reference")
SIGNALS = ("q", "k", "v", "log_decay", "gain", "mix")


def _signals(length: int = 70, heads: int = 4, width: int = 24) -> dict[str, Tensor]:
    """Return float64 signals and a prior, by name, with unit keys and two value heads per key head."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(2, length, heads // 2, width), dim=-1) for _ in range(2))
    gates = {"log_decay": -0.1 * normal(2, length, heads).exp(), "gain": normal(2, length, heads).sigmoid()}
    root = normal(2, heads, width, width) / width
    prior = {"cross": normal(2, heads, width, width + 6) / width, "gram": root @ root.mT}
    tokens = {"q": q, "k": k, "v": normal(2, length, heads, width + 6), "mix": normal(2, length, heads).sigmoid()}
    return tokens | gates | prior


def _run(x: dict[str, Tensor], **options: Any) -> Filtered:
    belief = RidgeBelief(x["cross"], (x["gram"] + x["gram"].mT) / 2)
    return ridge(**{name: x[name] for name in SIGNALS}, belief=belief, variance=True, **options)


def _gradients(x: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    found = _run(leaves, **options)
    loss = _loss(found)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def _variance(found: Filtered) -> Tensor:
    assert found.variance is not None
    return found.variance


def _loss(found: Filtered) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    parts = (found.mean, _variance(found), *found.belief)
    weights = (torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in parts)
    return torch.stack([(w * y).sum() for w, y in zip(weights, parts, strict=True)]).sum()


def _error(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None and want is not None
    got, want = got.detach(), want.detach()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("strength", [Adaptive(0.02), Adaptive(0.1), Fixed(0.25)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sixty_chebyshev_iterations_are_exact(kernel: str, strength: object) -> None:
    x = _signals()
    got, want = (_run(x, ridge=strength, solver=s, kernel=kernel) for s in (Chebyshev(60), Exact()))
    assert _error(got.mean, want.mean) < 1e-6
    assert _error(got.variance, want.variance) < 1e-6


@pytest.mark.parametrize("strength", [Adaptive(0.02), Fixed(0.25)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_sixty_iterations_equal_those_of_exact_solution(kernel: str, strength: object) -> None:
    """The reference is autograd through the oracle, for q, k, v, every gate and the prior."""
    x = _signals(length=40)
    got = _gradients(x, ridge=strength, solver=Chebyshev(60), kernel=kernel)

    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    signals = {name: leaves[name] for name in ("log_decay", "mix")} | {"obs_noise": 1 / leaves["gain"]}
    belief = RidgeBelief(leaves["cross"], (leaves["gram"] + leaves["gram"].mT) / 2)
    q, k, v = (leaves[name] for name in ("q", "k", "v"))
    found = oracle(designs.GATED_KALMANET, q, k, v, **signals, belief=belief, variance=True, ridge=strength)
    loss = _loss(found)
    want = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for name in x:
        assert _error(got[name], want[name]) < 1e-5, name


@pytest.mark.parametrize(("factor", "iterations"), [(0.02, 30), (0.02, 1), (0.5, 30), (0.02, 60)])
def test_unrolled_backward_equals_autograd_through_the_iteration(factor: float, iterations: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    root = normal(5, 12, 12)
    gram = root @ root.mT
    gram = gram / torch.linalg.matrix_norm(gram)[:, None, None]
    matrix = (gram + factor * torch.eye(12)) / (factor + 0.5)
    rho = torch.full((5, 1), 0.5 / (factor + 0.5), dtype=torch.float64) * (1 + 0.01 * normal(5, 1))
    leaves = tuple(y.requires_grad_() for y in (matrix, normal(5, 12), rho))
    weight = normal(5, 12)
    custom = _Unrolled.apply(*leaves, iterations)
    unrolled = chebyshev(Matrices(leaves[0]).apply, leaves[1], leaves[2], iterations)
    assert _error(custom, unrolled) < 1e-14
    got, want = (torch.autograd.grad((weight * y).sum(), leaves) for y in (custom, unrolled))
    assert _error(got[0], want[0]) < 1e-9 and _error(got[1], want[1]) < 1e-9
    assert float((got[2] - want[2]).norm()) < 1e-9 * float(
        want[2].norm() + 1
    )  # the gradient of rho is 0 on convergence


def test_unrolled_gradients_equal_finite_differences() -> None:
    """With 4 iterations, for which implicit gradients have a large error."""
    x = {name: y[:1, :5] if name in SIGNALS else y[:1] for name, y in _signals(length=5, heads=2, width=4).items()}
    leaves = tuple(y.clone().requires_grad_() for y in x.values())

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        found = _run(dict(zip(x, given, strict=True)), solver=Chebyshev(4, backward="unrolled"))
        return found.mean, _variance(found), *found.belief

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_unrolled_gradients_require_kernel_reference() -> None:
    x = _signals(length=9)
    with pytest.raises(KernelError, match="use 'reference'"):
        _run(x, solver=Chebyshev(4, backward="unrolled"), kernel="chunked")


@pytest.mark.parametrize("kernel", KERNELS)
def test_implicit_gradient_error_follows_solution_error(kernel: str) -> None:
    x = _signals()
    few, more, exact = (_gradients(x, solver=s, kernel=kernel) for s in (Chebyshev(10), Chebyshev(30), Exact()))
    for name in ("q", "k", "v", "gain"):
        assert _error(more[name], exact[name]) < min(0.02, _error(few[name], exact[name]) / 10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_conjugate_gradient_converges_in_about_key_width_steps(kernel: str) -> None:
    x = _signals(width=8)
    got, want = (_run(x, solver=s, kernel=kernel) for s in (ConjugateGradient(12), Exact()))
    assert _error(got.mean, want.mean) < 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_sketch_is_the_best_solution_in_its_subspace(kernel: str) -> None:
    x = _signals(width=16)
    whole, exact = (_run(x, solver=s, kernel=kernel) for s in (Sketch(16, Exact()), Exact()))
    assert _error(whole.mean, exact.mean) < 1e-12
    parts = [_run(x, solver=Sketch(dim, Exact()), kernel=kernel) for dim in (4, 8, 12)]
    errors = [_error(part.variance, exact.variance) for part in parts]
    assert errors == sorted(errors, reverse=True)
    assert bool((_variance(parts[1]) <= _variance(exact) + 1e-12).all())  # q'x is maximal at the exact solution
    got, want = (_run(x, solver=Sketch(8, s), kernel=kernel) for s in (Chebyshev(60), Exact()))
    assert _error(got.mean, want.mean) < 1e-6


@pytest.mark.parametrize("solver", [Exact(), ConjugateGradient(40), Sketch(6, Exact())], ids=str)
def test_gradients_of_other_solvers_agree_between_kernels(solver: object) -> None:
    x = _signals(length=37, width=8)
    got, want = (_gradients(x, solver=solver, kernel=kernel) for kernel in KERNELS)
    for name in x:
        assert _error(got[name], want[name]) < 1e-8, name


@pytest.mark.parametrize("solver", [Chebyshev(30), ConjugateGradient(30), Exact(), Sketch(8)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1e-4])
@pytest.mark.parametrize("strength", [Adaptive(0.02), Fixed(0.25)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_or_tiny_keys_give_finite_results(kernel: str, strength: object, scale: float, solver: object) -> None:
    """The first tokens have tiny keys, later ones do not; the prior is 0."""
    x = {name: y.float() for name, y in _signals(length=18).items()}
    x["k"][:, :12] *= scale
    x |= {name: torch.zeros_like(x[name]) for name in ("cross", "gram")}
    found = _run(x, ridge=strength, solver=solver, kernel=kernel)
    assert all(bool(torch.isfinite(y).all()) for y in (found.mean, _variance(found), *found.belief))
    if scale == 0.0 and isinstance(strength, Adaptive):
        assert float(_variance(found)[:, :12].abs().max()) == 0
    gradients = _gradients(x, ridge=strength, solver=solver, kernel=kernel)
    assert all(bool(torch.isfinite(y).all()) for y in gradients.values())


@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_keys_give_zero_mean_and_variance(kernel: str) -> None:
    x = _signals(length=20)
    nothing = ridge(x["q"], 0 * x["k"], x["v"], variance=True, kernel=kernel)
    assert float(nothing.mean.abs().max()) == 0 and float(_variance(nothing).abs().max()) == 0


def test_ridge_without_decay_equals_dense() -> None:
    """With noise 1 / gain and P_0 = I, `dense` is a regression with ridge 1."""
    x = _signals()
    none = torch.zeros_like(x["gain"])
    got = ridge(x["q"], x["k"], x["v"], gain=x["gain"], ridge=Fixed(1.0), solver=Exact(), variance=True)
    want = dense(x["q"], x["k"], x["v"], obs_noise=1 / x["gain"], process_noise=none, variance=True)
    assert _error(got.mean, want.mean) < 1e-10
    assert _error(got.variance, want.variance) < 1e-10


def test_ridge_equals_weighted_least_squares() -> None:
    """At the last token, with discounted weights, solved by `lstsq`."""
    x = {name: y[:, :, :1] if name in ("q", "k") else y for name, y in _signals(heads=2).items()}
    got = ridge(x["q"], x["k"], x["v"], log_decay=x["log_decay"], gain=x["gain"], ridge=Fixed(0.3), solver=Exact())
    fade = (x["log_decay"].sum(1, keepdim=True) - x["log_decay"].cumsum(1)).exp() * x["gain"]
    root = fade[0, :, 1, None].sqrt()
    rows = torch.cat([root * x["k"][0, :, 0], 0.3**0.5 * torch.eye(24, dtype=torch.float64)])
    values = torch.cat([root * x["v"][0, :, 1], torch.zeros(24, 30, dtype=torch.float64)])
    memory = torch.linalg.lstsq(rows, values).solution
    assert _error(got.mean[0, -1, 1], x["q"][0, -1, 0] @ memory) < 1e-10


@pytest.mark.parametrize("width", [16, 40, 256])
def test_float32_gradients_are_accurate_for_all_widths(width: int) -> None:
    """The tolerance is the effect of rounding in 30 iterations with condition number 51."""
    exact = _signals(length=33, heads=2, width=width)
    single = {name: y.float() for name, y in exact.items()}
    got, want = _gradients(single, kernel="chunked"), _gradients(exact, kernel="chunked")
    for name in exact:
        assert _error(got[name].double(), want[name]) < 51 * 16 * torch.finfo(torch.float32).eps, name


def test_errors_name_the_argument() -> None:
    x = _signals(length=4)
    tokens = (x["q"], x["k"], x["v"])
    wrong = (
        (partial(ridge, *tokens, ridge="strong"), "ridge"),
        (partial(ridge, *tokens, ridge=0.0), "factor"),
        (partial(ridge, *tokens, solver="chebyshev"), "solver"),
        (partial(ridge, *tokens, mix=2 * torch.ones_like(x["mix"])), "mix"),
        (partial(ridge, *tokens, gain=-x["gain"]), "gain"),
        (partial(ridge, *tokens, belief=RidgeBelief(x["gram"], x["cross"])), "belief.cross"),
        (partial(Chebyshev, 0), "iterations"),
        (partial(Chebyshev, 3, backward="exact"), "backward"),
        (partial(Sketch, 3, Sketch(2)), "solver"),
        (partial(Fixed, -1.0), "value"),
    )
    for call, name in wrong:
        with pytest.raises(ArgumentError, match=name):
            call()


@pytest.mark.parametrize("strength", [Adaptive(0.02), Fixed(0.25)])
def test_unrolled_and_implicit_solvers_have_equal_outputs(strength: Any) -> None:
    x = _signals(length=5, heads=2, width=4)
    ways = (Chebyshev(6), Chebyshev(6, backward="unrolled"))
    implicit, unrolled = (_run(x, solver=solver, ridge=strength, kernel="reference") for solver in ways)
    assert _error(unrolled.mean, implicit.mean) < 1e-13 and _error(_variance(unrolled), _variance(implicit)) < 1e-13


def test_unrolled_gradients_are_finite_for_nearly_zero_keys() -> None:
    """With a fixed ridge the radius of the spectrum is 0 there, so w - 1 is 0 in every iteration."""
    x = _signals(length=6, heads=2, width=4)
    x |= {"k": 1e-9 * x["k"], "gram": 0 * x["gram"]}
    leaves = [x[name].float().requires_grad_() for name in ("q", "k", "v", "gain")]
    given = {name: y.float() for name, y in x.items()} | dict(zip(("q", "k", "v", "gain"), leaves, strict=True))
    found = _run(given, solver=Chebyshev(10, backward="unrolled"), ridge=Fixed(0.3))
    grad_mean, grad_variance = (
        torch.autograd.grad(
            y.square().sum() if y is found.mean else y.sum(), leaves, retain_graph=True, materialize_grads=True
        )
        for y in (found.mean, _variance(found))
    )
    assert all(bool(torch.isfinite(y).all()) for y in (*grad_mean, *grad_variance))
    torch.testing.assert_close(
        grad_variance[0], 4 * leaves[0].detach() / 0.3
    )  # gradient of |q|^2 / 0.3, for two value heads


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_smallest_log_decay_forgets(kernel: str) -> None:
    """Masks often hold the smallest number of a dtype, and twice this number overflows."""
    x = {name: y.float() for name, y in _signals(length=10, heads=2, width=4).items()}
    found = []
    for smallest in (torch.finfo(torch.float32).min, -1e3):
        log_decay = x["log_decay"].clone()
        log_decay[:, ::7] = smallest
        changed = x | {"log_decay": log_decay}
        result = _run(changed, kernel=kernel)
        found.append([result.mean, _variance(result), *result.belief, *_gradients(changed, kernel=kernel).values()])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
