"""The closed form of the variance of a diffusion that is watched, against its differential equation and its limits."""

from __future__ import annotations

import pytest
import torch

from kalmix.diffusions import riccati

F64 = torch.float64


@pytest.mark.parametrize("start", [0.0, 0.3, 5.0])
@pytest.mark.parametrize(("rate", "process"), [(0.4, 0.7), (0.0, 0.7), (0.4, 0.0), (0.0, 0.0)])
def test_the_variance_solves_its_equation(rate: float, process: float, start: float) -> None:
    """By classical Runge-Kutta steps of 1e-3."""
    noise, step, value = 0.5, 1e-3, torch.tensor(start, dtype=F64)

    def slope(v: torch.Tensor) -> torch.Tensor:
        return -2 * rate * v + process - v.square() / noise

    for _ in range(1500):
        a = slope(value)
        b = slope(value + step / 2 * a)
        c = slope(value + step / 2 * b)
        d = slope(value + step * c)
        value = value + step / 6 * (a + 2 * b + 2 * c + d)
    given = (torch.tensor(x, dtype=F64) for x in (rate, 1.5, process, noise))
    assert riccati(*given, start) == pytest.approx(float(value), rel=1e-9, abs=1e-12)


def test_the_variance_is_that_of_the_equations_page_and_of_a_filter_that_sees_often() -> None:
    rate, process, noise = (torch.tensor(x, dtype=F64) for x in (0.4, 0.7, 0.5))
    lag = torch.tensor([0.0, 0.01, 1.5, 1e4], dtype=F64)
    settled = (rate.square() + process / noise).sqrt()
    printed = noise * (settled * torch.tanh(settled * lag - torch.atanh(-rate / settled)) - rate)
    assert torch.allclose(riccati(rate, lag, process, noise), printed, atol=1e-12)
    variance, step = torch.zeros((), dtype=F64), 1e-4
    for _ in range(15_000):
        variance = variance * (1 - 2 * step * rate) + step * process
        variance = 1 / (1 / variance + step / noise)
    assert riccati(rate, lag, process, noise)[2] == pytest.approx(float(variance), rel=1e-3)


def test_gradients_are_finite_where_nothing_decays_or_no_time_has_passed() -> None:
    rate, process, lag = (torch.tensor([0.0, 0.5, 0.0], dtype=F64, requires_grad=True) for _ in range(3))
    riccati(rate, lag, process + 0.1, torch.tensor(0.5, dtype=F64)).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (rate, process, lag))
