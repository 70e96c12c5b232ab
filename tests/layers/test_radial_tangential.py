"""The radial-tangential layer compared with its op, residual and prediction."""

import torch

from kalmix import ops
from kalmix.layers import RadialTangentialAttention

from .conftest import shake
from .test_afa import observations, pairs


def test_against_its_op():
    torch.manual_seed(0)
    layer = RadialTangentialAttention(10, heads=2, head_dim=3).double()
    shake(layer)
    x, times, horizon = observations()
    q, k, v = layer.project(x)
    dynamics, robust_weights = layer.dynamics(torch.float64), layer.robust_weights(torch.float64)
    assert dynamics.key_noise.shape == robust_weights["nu"].shape == (2, 2)
    filtered = ops.attend_radial(q, k, v, **dynamics._asdict(), **robust_weights, times=times, variance=True)
    estimate_weight = torch.sigmoid(layer.residual)[:, None]
    rate = dynamics.log_decay[:, None] + 1j * dynamics.frequency
    estimate = pairs((1 - estimate_weight) * v + estimate_weight * filtered.mean)
    read = torch.exp(rate * horizon[..., None, None]) * estimate
    decay = torch.exp(2 * dynamics.log_decay * horizon[..., None])[..., None]
    noise = (dynamics.process_noise @ torch.tensor([1.0, 2.0], dtype=torch.float64) / 3)[:, None]
    grown = noise * (1 - decay) / (-2 * dynamics.log_decay)[:, None]
    spread = decay * estimate_weight**2 * filtered.variance[..., :3] + grown

    (mean, variance, _), _ = layer.read(x, variance=True, times=times, horizon=horizon)
    torch.testing.assert_close(pairs(mean.unflatten(-1, (2, -1))), read)
    torch.testing.assert_close(variance.unflatten(-1, (2, -1)), torch.cat([spread, spread], -1) / 2)


def test_residuals_across_have_as_many_degrees_of_freedom_as_directions():
    """One of C complex channels is along the direction and C - 1 are across it; nu counts two real parts of each."""
    robust_weights = RadialTangentialAttention(12, heads=2, head_dim=6).robust_weights(torch.float32)
    channels = RadialTangentialAttention(12, heads=2, head_dim=6).sizes.key_width
    torch.testing.assert_close(robust_weights["nu"], torch.tensor([[2.0, 2.0 * (channels - 1)]] * 2))
