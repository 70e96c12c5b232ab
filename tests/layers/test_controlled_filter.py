"""The closed form of optimal control compared with numerical optimisation and with the Riccati equation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kalmix.layers import AdaptiveFilterAttention, ControlledFilter
from kalmix.layers.controlled_filter import control, waypoint_fraction

from .conftest import shake

F64 = torch.float64
CASES = [(0.7, 1.3, 0.9, 2.5), (0.0, 0.4, 2.0, 0.3), (3.0, 0.0, 1.5, 40.0)]  # rate, frequency, duration, state_weight


def _numbers(*values: float) -> list[Tensor]:
    return [torch.tensor(x, dtype=F64) for x in values]


@pytest.mark.parametrize(("rate", "frequency", "duration", "state_weight"), CASES)
def test_no_control_costs_less(rate: float, frequency: float, duration: float, state_weight: float) -> None:
    """Compare with least squares over the control at quadrature nodes: cost c |x(T) - waypoint|^2 + int |b u|^2."""
    a, w, T, c = _numbers(rate, frequency, duration, state_weight)
    start, waypoint = torch.randn(2, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(24))
    nodes, weights = T / 2 * (1 + nodes), (T / 2 * weights).sqrt()
    pole = torch.complex(-a, w)
    arrives = (pole * (T - nodes)).exp() * weights  # of the control times the root of its weight
    system = torch.cat([torch.eye(24) + 0j, c.sqrt() * arrives[None]])
    wanted = torch.cat([torch.zeros(24) + 0j, (c.sqrt() * (waypoint - (pole * T).exp() * start))[None]])
    best = torch.linalg.lstsq(system, wanted[:, None]).solution[:, 0]
    given = {"rate": a, "frequency": w, "duration": T, "state_weight": c}
    torch.testing.assert_close(control(start, waypoint, nodes, **given), best / weights, atol=1e-8, rtol=0)
    beta = waypoint_fraction(a, T, c)
    end = (1 - beta) * (pole * T).exp() * start + beta * waypoint
    torch.testing.assert_close((pole * T).exp() * start + arrives @ best, end, atol=1e-8, rtol=0)


@pytest.mark.parametrize(("rate", "frequency", "duration", "state_weight"), CASES)
def test_the_cost_is_that_of_the_riccati_equation(
    rate: float, frequency: float, duration: float, state_weight: float
) -> None:
    """A regulator to 0 costs P(0) |x(0)|^2, with P' = 2 a P + P^2 integrated backwards from P(T) = c by Runge-Kutta."""
    P, steps = state_weight, 4000
    h = duration / steps

    def slope(P: float) -> float:
        return -2 * rate * P - P * P

    for _ in range(steps):
        k1 = slope(P)
        k2 = slope(P + h / 2 * k1)
        k3 = slope(P + h / 2 * k2)
        k4 = slope(P + h * k3)
        P += h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    a, w, T, c = _numbers(rate, frequency, duration, state_weight)
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(24))
    start, home = torch.tensor([0.8 - 0.6j, 0], dtype=torch.complex128)
    spent = control(start, home, T / 2 * (1 + nodes), rate=a, frequency=w, duration=T, state_weight=c).abs().square()
    missed = (1 - waypoint_fraction(a, T, c)) * (-a * T).exp()
    assert float(c * missed.square() + T / 2 * weights @ spent) == pytest.approx(P, abs=1e-8)


def test_waypoint_fraction_has_its_limits() -> None:
    rate, duration, state_weight = (torch.tensor([0.0, 0.5], dtype=F64, requires_grad=True) for _ in range(3))
    assert torch.equal(waypoint_fraction(rate, 0 * duration, state_weight), torch.zeros(2, dtype=F64))
    assert float(waypoint_fraction(rate, duration + 1, 1e12 + state_weight).min().detach()) > 1 - 1e-9
    waypoint_fraction(rate, (duration + 1).detach(), state_weight).sum().backward()
    assert rate.grad is not None and state_weight.grad is not None
    assert rate.grad.isfinite().all() and state_weight.grad.isfinite().all()


def test_output_lies_between_prediction_and_waypoint() -> None:
    torch.manual_seed(0)
    layer, free = (
        ControlledFilter(10, heads=2, head_dim=3, rank=2).double(),
        AdaptiveFilterAttention(10, heads=2, head_dim=3),
    )
    shake(layer)
    left = free.double().load_state_dict(layer.state_dict(), strict=False)
    assert all(name.startswith("waypoint_control") for name in left.unexpected_keys) and not left.missing_keys
    x, horizon = torch.randn(2, 5, 10, dtype=F64), torch.rand(2, 5, dtype=F64)
    (got, spread, _), _ = layer.read(x, variance=True, horizon=horizon)
    (predicted, same, _), _ = free.read(x, variance=True, horizon=horizon)
    up_proj = layer.waypoint_control.up_proj(layer.waypoint_control.down_proj(predicted))
    rate = layer.dynamics.log_rate.exp() * layer.dynamics.log_step.exp()
    gained = (
        layer.waypoint_control.log_waypoint_weight.exp()
        * (-torch.expm1(-2 * rate * horizon[..., None]) / (2 * rate))[..., None]
    )
    beta = (gained / (1 + gained)).repeat(1, 1, 1, 2).flatten(2)
    torch.testing.assert_close(got, (1 - beta) * predicted + beta * up_proj)
    torch.testing.assert_close(spread, same)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(x.float())[0].isfinite().all()
