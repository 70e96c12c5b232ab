"""The recurrent form compared with its equations and with a Kalman filter, and its robustness to outliers."""

import pytest
import torch

from kalmix import ArgumentError, Segments
from kalmix.layers import RecurrentFilterAttention

from .conftest import shake
from .test_afa import identity, kappa, observations, pairs

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def by_hand(layer, x, times, trusting=False):
    """Compute Algorithm 4 (corrected): estimates `[T, H, C]` of values, and their complex variances `[T, H]`."""
    q, k, v = (pairs(part)[0] for part in layer.project(x))
    (log_decay, frequency, process, *noises), robust_weights = (
        layer.dynamics(torch.float64),
        layer.robust_weights(torch.float64),
    )
    noise, full = sum(noises), torch.sigmoid(layer.residual)
    means, variances = torch.zeros_like(v), torch.zeros(v.shape[:2], dtype=torch.float64)
    for h in range(v.shape[1]):
        for t in range(x.shape[1]):
            if t == 0:
                key, value, variance = k[0, h], v[0, h], noise[h]
            else:
                lag = times[0, t] - times[0, t - 1]
                move = torch.exp((log_decay[h] + 1j * frequency[h]) * lag)
                key, value = move * key, move * value
                variance = (2 * log_decay[h] * lag).exp() * variance + process[h] * kappa(-log_decay[h], lag)
                guess = key
                for _ in range(layer.iterations):
                    far = (q[t, h] - guess).abs().square().sum() / (variance + noise[h])
                    weight = (
                        1.0 if trusting else (1 + far / robust_weights["nu"][h]) ** -robust_weights["temperature"][h]
                    )
                    after = 1 / (1 / variance + weight / noise[h])
                    gain = full[h] * weight * after / noise[h]
                    guess = key + gain * (k[t, h] - key)
                key, value, variance = guess, value + gain * (v[t, h] - value), after
            means[t, h], variances[t, h] = value, variance
    return means, variances


def compare(layer, x, times, expected):
    (mean, variance, _), _ = layer.read(x, variance=True, times=times)
    torch.testing.assert_close(pairs(mean.unflatten(-1, (layer.sizes.heads, -1)))[0], expected[0], **CLOSE)
    torch.testing.assert_close(variance.unflatten(-1, (layer.sizes.heads, -1))[0, ..., 0], expected[1] / 2, **CLOSE)


@pytest.mark.parametrize("iterations", [1, 4])
def test_against_the_equations(iterations):
    torch.manual_seed(0)
    layer = RecurrentFilterAttention(10, heads=2, head_dim=3, iterations=iterations, predict=None).double()
    shake(layer)
    with torch.no_grad():
        layer.residual.zero_()  # half steps
    x, times, _ = observations()
    compare(layer, 3 * x, times, by_hand(layer, 3 * x, times))
    with pytest.raises(ArgumentError, match="`times`"):
        layer(x, times=times.flip(1))


def test_times_and_states_are_checked():
    layer, times = RecurrentFilterAttention(4, heads=1, head_dim=2), torch.arange(5.0)[None]
    x = torch.randn(1, 5, 4)
    for wrong in (times * torch.nan, times.bool(), times.to("meta"), times + 1j):
        with pytest.raises(ArgumentError, match="`times`"):
            layer(x, times=wrong)
    _, state = layer(x, times=times)
    with pytest.raises(ArgumentError, match="`times` decreases"):
        layer(x, state, times=times)
    with pytest.raises(ArgumentError, match=r"`state\.precision`"):
        layer(x, state._replace(precision=-state.precision))
    with pytest.raises(ArgumentError, match="NaN"):
        layer(x * torch.nan)


def test_times_outside_every_run_may_decrease():
    layer, runs = RecurrentFilterAttention(4, heads=1, head_dim=2), Segments.of(torch.tensor([[0, 1, 3]]))
    x, times = torch.randn(1, 5, 4), torch.tensor([[5.0, 1.0, 2.0, 0.0, 0.0]])
    y, _ = layer(x, None, runs, times=times)
    torch.testing.assert_close(y[:, 1:3], layer(x[:, 1:3], times=times[:, 1:3])[0])


@pytest.mark.parametrize("iterations", [1, 5])
def test_unit_weights_and_full_steps_are_a_kalman_filter(iterations):
    torch.manual_seed(0)
    layer = RecurrentFilterAttention(10, heads=2, head_dim=3, iterations=iterations, predict=None).double()
    shake(layer)
    with torch.no_grad():
        layer.residual.fill_(60.0)
        layer.robust_weights.log_nu.fill_(1e9)
    x, times, _ = observations(12)
    compare(layer, x, times, by_hand(layer, x, times, trusting=True))


def simulated(layer, steps: int, outliers: float):
    """Simulate a trajectory of the layer's own dynamics and observations with outliers: both complex `[T, C]`."""
    log_decay, frequency, process, key, query = layer.dynamics(torch.float64)
    move = torch.exp(log_decay + 1j * frequency[0])
    grown, state, path = process * kappa(-log_decay, torch.ones(())), torch.full((2,), 3.0 + 0j), []
    for _ in range(steps):
        state = move * state + grown.sqrt() * torch.randn(2, dtype=torch.complex128)
        path.append(state)
    path = torch.stack(path)
    looks = path + (key + query).sqrt() * torch.randn_like(path)
    far = torch.rand(steps, 1) < outliers
    return path, looks + far * 10 * torch.randn_like(path)


@torch.no_grad()
@pytest.mark.slow
def test_outliers():
    """With 12% outliers, robust weights reduce the squared error tenfold; without outliers they do not raise it."""
    torch.manual_seed(0)
    layer = RecurrentFilterAttention(4, heads=1, head_dim=2, iterations=3, predict=None).double()
    identity(layer)
    layer.residual.fill_(60.0)
    layer.dynamics.log_rate.fill_(-4.0)
    layer.dynamics.process_noise.fill_(-4.0)
    layer.dynamics.key_noise.fill_(-2.0)
    layer.dynamics.query_noise.fill_(-4.0)

    def error(path, looks, nu: float) -> float:
        layer.robust_weights.log_nu.fill_(nu)
        x = torch.cat([looks.real, looks.imag], -1)[None]
        return float((pairs(layer.read(x)[0].mean)[0] - path).abs().square().mean())

    spoilt, clean = simulated(layer, 1000, 0.12), simulated(layer, 1000, 0.0)
    assert error(*spoilt, nu=1.0) < 0.1 * error(*spoilt, nu=1e9)
    assert error(*clean, nu=1.0) < 1.3 * error(*clean, nu=1e9)


@torch.no_grad()
def test_variance_is_calibrated_with_unit_weights():
    torch.manual_seed(0)
    layer = RecurrentFilterAttention(4, heads=1, head_dim=2, predict=None).double()
    identity(layer)
    layer.residual.fill_(60.0)
    layer.robust_weights.log_nu.fill_(1e9)
    path, looks = simulated(layer, 2000, 0.0)
    (mean, variance, _), _ = layer.read(torch.cat([looks.real, looks.imag], -1)[None], variance=True)
    ratio = (mean[0] - torch.cat([path.real, path.imag], -1)).square() / variance[0]
    assert 0.85 < ratio.mean() < 1.15  # 8000 squares, correlated over some ten tokens
