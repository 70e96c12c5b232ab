"""Adaptive Filter Attention compared with its equations in complex arithmetic."""

import math

import pytest
import torch

from kalmix import ArgumentError
from kalmix.layers import AdaptiveFilterAttention

from .conftest import shake

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def built(**options) -> AdaptiveFilterAttention:
    torch.manual_seed(0)
    layer = AdaptiveFilterAttention(10, heads=2, head_dim=3, **options).double()
    shake(layer)
    return layer


def observations(length: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, irregular times with one tie, and prediction horizons."""
    torch.manual_seed(1)
    gaps = torch.rand(1, length, dtype=torch.float64) * 2
    gaps[:, 3] = 0
    return torch.randn(1, length, 10, dtype=torch.float64), gaps.cumsum(1), torch.rand(1, length, dtype=torch.float64)


def pairs(x: torch.Tensor) -> torch.Tensor:
    """Convert `[..., 2 C]` to complex `[..., C]`."""
    return torch.complex(*x.chunk(2, -1))


def kappa(rate, lag):
    return -torch.expm1(-2 * rate * lag) / (2 * rate)


def by_hand(layer, x, times, horizon):
    """Compute Algorithm 1 as a double loop: read-outs, complex variances `[T, H]`, and values, complex `[T, H, C]`."""
    q, k, v = (pairs(part)[0] for part in layer.project(x))
    if layer.normalize:
        q, k = (z / (z.abs().square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    keys, values = layer.dynamics(torch.float64), layer.state_dynamics(torch.float64)
    robust_weights, estimate_weight = layer.robust_weights(torch.float64), torch.sigmoid(layer.residual)
    floor, (a, w) = robust_weights.get("floor", torch.zeros(2)), (-keys.log_decay, keys.frequency)
    read, spread = torch.zeros_like(v), torch.zeros(v.shape[:2], dtype=torch.float64)
    for h in range(2):
        for i in range(x.shape[1]):
            query = q[i, h]
            for step in reversed(range(layer.iterations)):
                scores, precisions, carried = [], [], []
                for j in range(i + 1):
                    lag = times[0, i] - times[0, j]
                    decay = torch.exp(-a[h] * lag)
                    noise = (
                        keys.process_noise[h] * kappa(a[h], lag) + keys.key_noise[h] * decay**2 + keys.query_noise[h]
                    )
                    key = torch.exp(1j * w[h] * lag) * k[j, h]
                    far = (query - (decay + floor[h]) * key).abs().square().sum() / noise / robust_weights["nu"][h]
                    weight = torch.exp(-far) if layer.weight == "exponential" else 1 / (1 + far)
                    move = keys if step else values  # before the last iteration, keys are averaged
                    reach = torch.exp(move.log_decay[h] * lag)
                    sure = move.process_noise[h] * kappa(-move.log_decay[h], lag) + move.key_noise[h] * reach**2
                    scores.append(robust_weights["temperature"][h] * torch.log(weight / (sure + move.query_noise[h])))
                    precisions.append(weight / sure)
                    values_of = k if step else v
                    carried.append(reach * torch.exp(1j * move.frequency[h] * lag) * values_of[j, h])
                found = (torch.stack(scores).softmax(0)[:, None] * torch.stack(carried)).sum(0)
                query = query + estimate_weight[h] * (found - query)
            precision = torch.stack(precisions).sum()
            gate = 1.0
            if layer.confidence is not None:
                gate = torch.sigmoid(layer.confidence.weight[h] * precision.log() + layer.confidence.bias[h])
            estimate = (1 - estimate_weight[h]) * v[i, h] + estimate_weight[h] * gate * found
            left = (estimate_weight[h] * gate) ** 2 / precision
            move = torch.exp((values.log_decay[h] + 1j * values.frequency[h]) * horizon[0, i])
            grown = values.process_noise[h] * kappa(-values.log_decay[h], horizon[0, i])
            share = torch.full((3,), float(layer.predict == "step"), dtype=torch.float64)
            if layer.prediction_gate is not None:
                surprise = torch.log1p((estimate - v[i, h]).abs().square())
                share = torch.sigmoid(layer.prediction_gate.weight[h] @ surprise + layer.prediction_gate.bias[h])
            read[i, h] = (1 - share) * estimate + share * move * estimate
            spread[i, h] = ((1 - share + share * move).abs().square() * left + share**2 * grown).mean()
    return read, spread


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"predict": None, "weight": "exponential", "floor": True},
        {"value_dynamics": True, "iterations": 3, "normalize": True},
        {"predict": "gate", "confidence": True, "value_dynamics": True},
    ],
)
def test_against_the_equations(options):
    layer = built(**options)
    x, times, horizon = observations()
    (mean, variance, _), _ = layer.read(x, variance=True, times=times, horizon=horizon)
    read, spread = by_hand(layer, x, times, horizon)
    torch.testing.assert_close(pairs(mean.unflatten(-1, (2, -1)))[0], read, **CLOSE)
    torch.testing.assert_close(variance.unflatten(-1, (2, -1))[0].mean(-1), spread / 2, **CLOSE)
    expected = torch.cat([read.real, read.imag], -1).flatten(1) @ layer.out_proj.weight.T + layer.out_proj.bias
    torch.testing.assert_close(layer(x, times=times, horizon=horizon)[0][0], expected, **CLOSE)


def test_time_is_relative_and_defaults_to_one_unit_per_token():
    layer = built()
    x, times, horizon = observations()
    torch.testing.assert_close(
        layer(x, times=times + 1000, horizon=horizon)[0], layer(x, times=times, horizon=horizon)[0]
    )
    counted = torch.arange(7, dtype=torch.float64)[None]
    torch.testing.assert_close(layer(x, times=counted, horizon=torch.ones_like(counted))[0], layer(x)[0])
    y, state = layer(x[:, :4], times=times[:, :4], horizon=horizon[:, :4])
    later, _ = layer(x[:, 4:], state, times=times[:, 4:], horizon=horizon[:, 4:])
    torch.testing.assert_close(torch.cat([y, later], 1), layer(x, times=times, horizon=horizon)[0])
    for wrong in (horizon[:, 1:], -horizon, horizon * torch.nan, horizon.to(torch.complex64)):
        with pytest.raises(ArgumentError, match="`horizon`"):
            layer(x, horizon=wrong)


def identity(layer: AdaptiveFilterAttention) -> None:
    """Make queries, keys and values equal to the token, which has as many columns as a head."""
    width = layer.hidden_size
    with torch.no_grad():
        layer.in_proj.weight.copy_(torch.eye(width).repeat(3, 1))
        layer.in_proj.bias.zero_()
        layer.out_proj.weight.copy_(torch.eye(width))
        layer.out_proj.bias.zero_()


def test_biases_cover_drift_and_delay():
    """Sections 3.9 and 3.10: a drift is a diffusion about -u / lambda; a delay or bias of measurements moves it."""
    torch.manual_seed(0)
    layer, biased = (AdaptiveFilterAttention(6, heads=1, head_dim=3).double() for _ in range(2))
    shake(layer)
    identity(layer)
    biased.load_state_dict(layer.state_dict())
    drift, offset = (torch.randn(3, dtype=torch.complex128) for _ in range(2))
    rate = layer.dynamics(torch.float64).log_decay[0] + 1j * layer.dynamics(torch.float64).frequency[0]
    shift = drift / rate - offset
    columns = torch.cat([shift.real, shift.imag])
    with torch.no_grad():
        biased.in_proj.bias.copy_(columns.repeat(3))
        biased.out_proj.bias.copy_(-columns)
    # Move every observation forward as a drifting diffusion, with a delay and a bias of the measurement.
    x, times, delay = torch.randn(1, 6, 6, dtype=torch.float64), torch.rand(1, 6, dtype=torch.float64).cumsum(1), 0.7
    z = pairs(x)[0]

    def drifted(state, lag):
        return torch.exp(rate * lag) * state + torch.expm1(rate * lag) / rate * drift if lag else state

    def carried(look, lag):  # from t_j + delay back to t_j, forward to t_i and to its measurement
        return drifted(drifted(drifted(look - offset, -delay), lag), delay) + offset

    (q, values), found = (layer.dynamics(torch.float64), layer.robust_weights(torch.float64)), []
    for i in range(6):
        lags = times[0, i] - times[0, : i + 1]
        estimates = torch.stack([carried(z[j], lags[j]) for j in range(i + 1)])
        a = -q.log_decay
        noise = q.process_noise * kappa(a, lags) + q.key_noise * torch.exp(-2 * a * lags) + q.query_noise
        score = -values["temperature"] * torch.log(noise + (z[i] - estimates).abs().square().sum(-1) / values["nu"])
        pooled = score.softmax(0) @ estimates.real + 1j * (score.softmax(0) @ estimates.imag)
        estimate_weight = torch.sigmoid(layer.residual)
        found.append(carried((1 - estimate_weight) * z[i] + estimate_weight * pooled, 1.0))
    expected = torch.stack(found)
    torch.testing.assert_close(pairs(biased(x, times=times)[0])[0], expected, **CLOSE)


def test_exact_without_process_noise():
    """Without process noise and with unit weights, the estimate is that of a Kalman filter with a flat prior."""
    torch.manual_seed(0)
    layer = AdaptiveFilterAttention(4, heads=1, head_dim=2, predict=None).double()
    identity(layer)
    with torch.no_grad():
        layer.dynamics.process_noise.fill_(-60.0)  # only the floor remains
        layer.dynamics.query_noise.fill_(-60.0)
        layer.robust_weights.log_nu.fill_(1e9)
        layer.residual.fill_(60.0)
    keys = layer.dynamics(torch.float64)
    assert keys.process_noise < 2e-6 and keys.query_noise < 2e-4
    x = torch.randn(1, 20, 4, dtype=torch.float64)
    (mean, variance, _), _ = layer.read(x, variance=True)
    move = torch.exp(keys.log_decay + 1j * keys.frequency[0])
    state, spread = pairs(x)[0, 0], keys.key_noise
    for t, look in enumerate(pairs(x)[0]):
        if t:
            state, spread = move * state, keys.log_decay.mul(2).exp() * spread
            gain = spread / (spread + keys.key_noise)
            state, spread = state + gain * (look - state), (1 - gain) * spread
        torch.testing.assert_close(pairs(mean)[0, t], state, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(variance[0, t], (spread / 2).expand(4), rtol=2e-3, atol=0)


def test_sample_mean_and_variance():
    """Samples have the mean of the posterior, and its variance plus that of the measurement noise."""
    layer = built(value_dynamics=True)
    x, times, horizon = observations(4)
    with torch.no_grad():
        drawn = layer.sample(x, count=20_000, times=times, horizon=horizon)
        filtered = layer.filter(x, variance=True, times=times, horizon=horizon)
        look = layer.value_dynamics(torch.float64).key_noise.repeat_interleave(6) / 2
        expected = filtered.variance + layer.out_proj.weight.square() @ look
    assert drawn.shape == (20_000, 1, 4, 10)
    error = (drawn.mean(0) - filtered.mean) / (expected / 20_000).sqrt()
    assert error.abs().max() < 4.5
    torch.testing.assert_close(drawn.var(0), expected, rtol=5 * math.sqrt(2 / 20_000), atol=0)


def test_attention_map_weights_the_values():
    """Maps applied to values that do not rotate give the estimate; one token is predicted as the first estimate is."""
    layer = built(predict=None, value_dynamics=True)
    x, times, _ = observations()
    with torch.no_grad():
        layer.residual.fill_(60.0)
        layer.value_dynamics.frequency.zero_()
        weights = layer.attention_map(x, times)
        read = layer.read(x, times=times)[0].mean.unflatten(-1, (2, 6))
        torch.testing.assert_close(torch.einsum("bhts,bshc->bthc", weights, layer.project(x)[2]), read)
        assert (weights.triu(1) == 0).all() and (weights >= 0).all()
        layer, x, horizon = built(value_dynamics=True), x[:, :1], times[:, :1]
        torch.testing.assert_close(layer.predict_from_token(x, horizon), layer(x, horizon=horizon)[0])


def test_initial_weights():
    """The start "attention" weights tokens by content and lag, by head; the start "filter" hardly by content."""
    x = torch.randn(8, 256, 128, generator=torch.Generator().manual_seed(0))
    content, lags = {}, {}
    for initial in ("filter", "attention"):
        torch.manual_seed(0)
        layer = AdaptiveFilterAttention(128, heads=4, initial=initial)
        with torch.no_grad():
            weights = layer.attention_map(x)[:, :, -1]  # of the last query, decay included
        lag = torch.arange(255.0, -1, -1)
        lags[initial] = ((weights * lag).sum(-1) / weights.sum(-1)).mean(0)
        content[initial] = weights[..., -33:-1].log().std(0).mean(-1)  # between rows, at equal lags
    assert (content["filter"] < 0.1).all() and (content["attention"] > 0.4).all()
    assert lags["attention"][0] < 5 and lags["attention"][-1] > 100 and lags["attention"].diff().min() > 0
    with pytest.raises(ArgumentError, match="initial"):
        AdaptiveFilterAttention(128, initial="random")
