"""The AFA transformer block compared with Algorithm 3 (corrected) in complex arithmetic."""

import pytest
import torch

from kalmix import ArgumentError
from kalmix.layers import AFATransformerBlock

from .conftest import shake
from .test_afa import kappa, observations, pairs


def attended(core, q, k, v, times):
    """Compute the core of Algorithm 1 for one sequence, complex `[T, H, C]`."""
    (log_decay, frequency, process, key, query), robust_weights = (
        core.dynamics(torch.float64),
        core.robust_weights(torch.float64),
    )
    lag = (times[0, :, None] - times[0]).clamp(min=0)[..., None]  # [T, T, 1]
    decay = torch.exp(log_decay * lag)
    noise = process * kappa(-log_decay, lag) + key * decay**2 + query
    move = torch.exp((log_decay[:, None] + 1j * frequency) * lag[..., None])
    far = (q[:, None] - move * k).abs().square().sum(-1)
    score = -robust_weights["temperature"] * torch.log(noise + far / robust_weights["nu"])
    later = torch.ones(lag.shape[:2], dtype=torch.bool).triu(1)[..., None]
    score = score.masked_fill(later, -torch.inf)
    return (score.softmax(1)[..., None] * move * v).sum(1)


def test_against_the_equations():
    torch.manual_seed(0)
    layer = AFATransformerBlock(10, heads=2, head_dim=3).double()
    shake(layer)
    x, times, _ = observations()
    parts = [pairs(part.unflatten(-1, (2, -1)))[0] for part in layer.in_proj(x).chunk(3, -1)]
    sizes = [part.abs().square().sum(-1, keepdim=True).sqrt() for part in parts]
    units = [layer.input_scale[:, None] * part / (size + 1e-6) for part, size in zip(parts, sizes, strict=True)]
    magnitude = attended(layer.magnitude, *(size + 0j for size in sizes), times)
    towards = units[2] + attended(layer.direction, *units, times)
    length = towards.abs().square().sum(-1, keepdim=True).sqrt()
    z = magnitude.real * layer.output_scale[:, None] * towards / (length + 1e-6)
    read = torch.cat([z.real, z.imag], -1).flatten(1)
    y = layer.mlp_out(torch.relu(layer.mlp_in(layer.out_proj(read))))
    torch.testing.assert_close(layer(x, times=times)[0][0], y, rtol=1e-9, atol=1e-9)


def test_a_state_without_magnitudes_is_refused():
    layer, x = AFATransformerBlock(8, heads=2), torch.randn(1, 3, 8)
    state = layer(x)[1]
    with pytest.raises(ArgumentError, match="`state` lacks magnitude"):
        layer(x, state._replace(magnitude=None))


def test_histories_of_a_state_store_the_same_tokens():
    layer = AFATransformerBlock(8, heads=2)
    long, short = (layer(torch.randn(1, length, 8))[1] for length in (5, 3))
    x = torch.randn(1, 2, 8)
    with pytest.raises(ArgumentError, match=r"`state.direction.positions` has shape \[1, 5\]; expected \[1, 3\]"):
        layer(x, long._replace(magnitude=short.magnitude))
    direction = long.direction
    for wrong in (
        direction._replace(times=direction.times - 1),
        direction._replace(positions=torch.tensor([[-1, 0, 1, 2, 3]])),
    ):
        with pytest.raises(ArgumentError, match=r"`state.direction` has other positions or times"):
            layer(x, long._replace(direction=wrong))
