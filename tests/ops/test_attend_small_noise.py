"""Gradients of `attend` in float32 over wide ranges of noises, against float64 within the computed budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from histories import Signals, arguments, signals, with_gradients
from torch import Tensor

from kalmix.ops import attend
from kalmix.ops._shared import batching
from kalmix.testing.heads import Axis, draw_weights, solve_together
from kalmix.testing.tolerances import budgets, relative_error

NOISES = (1e-5, 1e-2, 1e2, *(pytest.param(x, marks=pytest.mark.slow) for x in (1e-4, 1.0)))
LENGTHS = {"chunked": 150, "reference": 37}


def _drawn(seed: int, length: int, key_noise: float, own_dynamics: bool) -> Signals:
    """Draw inputs that float32 represents exactly, with one key noise, and small and large process noises by head."""
    x = signals(length, channels=4, value_channels=3 if own_dynamics else None, seed=seed)
    x |= {name: x[name] / 8**0.5 for name in "qk"}
    for name in (y for y in x if y.endswith("process_noise")):
        x[name] = torch.tensor([1e-4, 1.0], dtype=torch.float64)
    for name in (y for y in x if y.endswith("key_noise")):
        x[name] = torch.full_like(x[name], key_noise)
    return {name: y.float().double() for name, y in x.items()}


def _answer(x: Signals, dtype: torch.dtype, variance: bool, count: int = 1, **options: Any) -> list[Tensor]:
    """Return outputs and gradients, computed in `dtype`; `count` problems have joined heads."""
    given = with_gradients({name: y if name == "times" else y.to(dtype) for name, y in x.items()})
    found = attend(**arguments(given), variance=variance, **options)
    outputs = [found.mean, *([] if found.variance is None else [found.variance.log()])]
    weights = draw_weights(outputs, [2] * len(outputs), count)
    asked = [y for y in given.values() if y.requires_grad]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, asked, weights))


def _check(x: Signals, variance: bool, kernel: str, ends: str | tuple[str, ...] = "", **options: Any) -> None:
    """Compare outputs and gradients whose names end in `ends`."""
    got = _answer(x, torch.float32, variance, kernel=kernel, **options)

    def exact(moved: Signals, count: int = 1) -> list[Tensor]:
        return _answer(moved, torch.float64, variance, count, kernel="reference", **options)

    names = ["mean", *["variance"][:variance], *(f"d {name}" for name in x if name != "times")]
    want = exact(x)
    axes: dict[str, Axis] = {name: None if name == "times" else 2 if name in "qkv" else 0 for name in x}
    together = solve_together(exact, axes, [2] * (1 + variance) + [axes[name] for name in x if name != "times"])
    allowed = budgets(exact, x, want, torch.float32, [torch.float32] * len(got), exact_many=together)
    for name, ours, theirs, budget in zip(names, got, want, allowed, strict=True):
        error = relative_error(ours, theirs)
        assert not name.endswith(ends) or error <= budget, f"{name}: {error:.1e}, allowed {budget:.1e}"


@pytest.mark.parametrize("kernel", ["chunked", "reference"])
@pytest.mark.parametrize("variance", [False, True], ids=["mean", "variance"])
@pytest.mark.parametrize("weight", ["rational", "exponential"])
@pytest.mark.parametrize("own_dynamics", [False, True], ids=["shared", "own value dynamics"])
@pytest.mark.parametrize("key_noise", NOISES)
def test_gradients_are_accurate_at_any_key_noise(
    key_noise: float, own_dynamics: bool, weight: str, variance: bool, kernel: str
) -> None:
    _check(_drawn(len(weight), LENGTHS[kernel], key_noise, own_dynamics), variance, kernel, weight=weight)


@pytest.mark.parametrize("kernel", ["chunked", "reference"])
@pytest.mark.parametrize("variance", [False, True], ids=["mean", "variance"])
@pytest.mark.parametrize("weight", ["rational", "exponential"])
def test_decay_gradient_is_accurate_at_a_large_query_noise(weight: str, variance: bool, kernel: str) -> None:
    """For later keys, residual and variance grow alike, so the terms of the gradient nearly cancel."""
    x = _drawn(3, 37, 1e-4, True)
    x |= {name: torch.full_like(y, 100.0) for name, y in x.items() if name.endswith("query_noise")}
    x |= {"k": x["k"] / 64, "times": x["times"] / 1024, "nu": torch.full_like(x["nu"], 2.0**-9)}
    _check(x, variance, kernel, "log_decay", weight=weight, causal=False)


@pytest.mark.parametrize("kernel", ["chunked", "reference"])
@pytest.mark.parametrize("room", [batching.MAX_ENTRIES_CPU, 1], ids=["one tile of keys", "several"])
@pytest.mark.parametrize("own_dynamics", [False, True], ids=["shared", "own value dynamics"])
def test_noise_gradients_are_accurate_if_one_key_has_nearly_all_weight(
    own_dynamics: bool, room: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of its score is a small difference, which a residual of thousands of variances multiplies."""
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", room)
    x = _drawn(11, 150, 1e-4, own_dynamics)
    for name in (y for y in x if y.endswith(("query_noise", "process_noise"))):
        x[name] = x[name] * 0 + (1e-4 if name.endswith("query_noise") else 1.0)
    x = {name: y.float().double() for name, y in x.items()}
    named = ("d q", "d k", "d key_noise", "d query_noise", "d nu", "d floor")
    _check(x, False, kernel, named, weight="exponential")
