"""Parametrisations give valid signals exactly, and gradients that do not vanish."""

import math

import pytest
import torch

from kalmix.layers.parametrize import (
    CellDynamics,
    StateDynamics,
    StepDynamics,
    discretize_ou,
    discretize_zoh,
    observation_precision,
    positive,
)

FAR = [s * x for s in (-1, 1) for x in (0.0, 1.0, 7.9, 8.1, 30.0, 50.0, 80.0, 1000.0)]


@pytest.mark.parametrize("raw", FAR)
def test_positive_never_underflows(raw):
    x = torch.tensor(raw, requires_grad=True)
    value = positive(x)
    (slope,) = torch.autograd.grad(value.log(), x)
    assert 0 < value < math.inf
    torch.testing.assert_close(slope, torch.tensor(min(1.0, 8 / max(abs(raw), 1e-9))))


def test_positive_is_exp_below_the_knee():
    raw = torch.linspace(-8, 8, 101)
    torch.testing.assert_close(positive(raw), raw.exp())
    wide = torch.linspace(-1e4, 1e4, 10001, dtype=torch.float64)
    assert (positive(wide).log().diff() > 0).all()


@pytest.mark.parametrize("raw", [-80.0, -30.0, 30.0, 80.0])
@pytest.mark.parametrize("name", ["log_rate", "log_step", "log_diffusion"])
@pytest.mark.parametrize("discretization", ["ou", "zoh"])
def test_process_noise_never_underflows(raw, name, discretization):
    """For any parameter value the noise is positive and has a gradient to its diffusion."""
    dynamics = CellDynamics(2, 3, discretization)
    torch.nn.init.constant_(getattr(dynamics, name), raw)
    log_decay, noise = dynamics(torch.float32)
    assert (log_decay <= 0).all() and torch.isfinite(log_decay).all()
    assert (noise > 0).all() and torch.isfinite(noise).all()
    (slope,) = torch.autograd.grad(noise.log().sum(), dynamics.log_diffusion)
    assert (slope.abs() >= 0.099).all()  # 8 / 80


def moments(rate: float, diffusion: float, step: float, m: float, P: float) -> tuple[float, float]:
    """Compute mean and variance of the stochastic differential equation after `step` by Runge-Kutta."""
    slope = lambda m, P: (-rate * m, -2 * rate * P + diffusion)  # noqa: E731
    n = 2000
    h = step / n
    for _ in range(n):
        a = slope(m, P)
        b = slope(m + h / 2 * a[0], P + h / 2 * a[1])
        c = slope(m + h / 2 * b[0], P + h / 2 * b[1])
        d = slope(m + h * c[0], P + h * c[1])
        m, P = (x + h / 6 * (p + 2 * q + 2 * r + s) for x, p, q, r, s in zip((m, P), a, b, c, d, strict=True))
    return m, P


@pytest.mark.parametrize(("rate", "diffusion", "step"), [(1.0, 0.01, 0.05), (3.0, 2.0, 1.0), (1e-6, 0.5, 0.1)])
def test_ornstein_uhlenbeck_moments(rate, diffusion, step):
    args = [torch.tensor(x, dtype=torch.float64) for x in (rate, diffusion, step)]
    log_decay, noise = discretize_ou(*args)
    m, P = moments(rate, diffusion, step, 1.5, 0.7)
    assert float(log_decay.exp() * 1.5) == pytest.approx(m, rel=1e-12)
    assert float((2 * log_decay).exp() * 0.7 + noise) == pytest.approx(P, rel=1e-10)


def test_only_the_exact_discretisation_composes():
    """Two half steps equal one step (semigroup property); the zero-order hold deviates by about alpha dt."""
    rate, diffusion, step = (torch.tensor(x, dtype=torch.float64) for x in (1.0, 0.3, 0.1))
    for discretize, exact in ((discretize_ou, True), (discretize_zoh, False)):
        whole, half = discretize(rate, diffusion, step), discretize(rate, diffusion, step / 2)
        twice = (2 * half[0], (2 * half[0]).exp() * half[1] + half[1])
        torch.testing.assert_close(twice[0], whole[0])
        assert (abs(float(twice[1] / whole[1]) - 1) < 1e-12) == exact


def test_small_rates_keep_their_digits():
    """(1 - exp(-2 a dt)) / 2a cancels in float32; `expm1` does not."""
    rate, step = torch.tensor(1e-7), torch.tensor(0.01)
    torch.testing.assert_close(discretize_ou(rate, torch.tensor(1.0), step)[1], step, rtol=1e-6, atol=0)


def test_initial_values():
    torch.manual_seed(0)
    dynamics = CellDynamics(16, 500)
    rate, step, diffusion = (positive(p) for p in (dynamics.log_rate, dynamics.log_step, dynamics.log_diffusion))
    assert (rate == 1).all()
    torch.testing.assert_close(diffusion, torch.full_like(diffusion, 0.01))
    assert step.min() >= 0.001 and step.max() <= 0.1
    # Uniform on a log scale: a mean of log 0.01, with standard error width / sqrt(12 n).
    error = math.log(100) / math.sqrt(12 * step.numel())
    assert abs(float(step.log().mean().detach()) - math.log(0.01)) < 5 * error
    log_decay, noise = CellDynamics(4, 5, process_noise=False)(torch.float32)
    assert (noise == 0).all() and (log_decay < 0).all()


@pytest.mark.parametrize("raw", [-100.0, -1.0, 0.0, 5.0, 1e4])
def test_observation_precision(raw):
    x = torch.tensor(raw, dtype=torch.bfloat16)
    precision = observation_precision(x)
    assert precision.dtype == torch.float32 and 0 < precision <= 1e4 * (1 + 1e-6)
    expected = 1 / (math.log1p(math.exp(float(x))) + 1e-4) if raw < 500 else 1 / float(x)
    assert float(precision) == pytest.approx(expected, rel=1e-5)


def test_state_dynamics():
    """Frequencies come in pairs, rotary at first; a step scales time, not the measurement noise."""
    torch.manual_seed(0)
    dynamics = StateDynamics(3, 5, 100.0, parts=(2,))
    known = dynamics(torch.float32)
    turn = 100.0 ** (-torch.arange(3) / 3)
    torch.testing.assert_close(known.frequency, torch.cat([turn, -turn])[:5].expand(3, 5))
    assert (known.log_decay <= -0.001).all() and (known.log_decay >= -0.1).all()
    for noise, initial in zip(known[2:], (0.1, 1.0, 1.0), strict=True):
        torch.testing.assert_close(noise, torch.full((3, 2), initial), rtol=1e-3, atol=0)
    with torch.no_grad():
        dynamics.log_step.fill_(math.log(2.0))
    slower = dynamics(torch.float32)
    for name in known._fields:
        scale = 1.0 if name in ("key_noise", "query_noise") else 2.0
        torch.testing.assert_close(getattr(slower, name), scale * getattr(known, name))
    assert (StateDynamics(3, 5, None)(torch.float32).frequency == 0).all()
    spread = StateDynamics(4, 5, None, initial="attention")(torch.float32)
    torch.testing.assert_close(spread.process_noise, torch.tensor([1e-1, 1e-2, 1e-3, 1e-4]), rtol=2e-2, atol=0)
    torch.testing.assert_close(spread.log_decay, torch.tensor([-1e-2, -1e-3, -1e-4, -1e-5]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("raw", [-80.0, 80.0])
def test_state_dynamics_at_extreme_parameters(raw):
    """Any parameter value gives valid arguments: signs, finite numbers, noises above their floors."""
    dynamics = StateDynamics(2, 3, 100.0)
    with torch.no_grad():
        for parameter in dynamics.parameters():
            parameter.fill_(raw)
    known = dynamics(torch.float32)
    assert all(torch.isfinite(part).all() for part in known)
    assert (known.log_decay <= 0).all() and (known.process_noise >= 0).all()
    assert (known.key_noise >= 1e-4).all() and (known.query_noise >= 1e-4).all()


def test_initial_steps_are_log_uniform():
    torch.manual_seed(0)
    steps = torch.nn.functional.softplus(StepDynamics(3, 4000, min_rate=1.0, rotates=False).step_bias.detach())
    assert 0.00099 < float(steps.min()) < 0.0011 and 0.095 < float(steps.max()) < 0.1001
