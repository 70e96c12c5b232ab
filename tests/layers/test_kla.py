"""KLA compared with its equations, and its variance with samples."""

import math

import pytest
import torch
import torch.nn.functional as F

import kalmix
from kalmix import designs
from kalmix.layers import KLA
from kalmix.layers.fused import l2_normalize
from kalmix.layers.modules import sample_gaussian

from .conftest import shake


def test_against_the_paper_written_out():
    """Compute Algorithm 1 with the oracle as its filter."""
    torch.manual_seed(0)
    layer = KLA(6, slots=3).double()
    shake(layer)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    z, gate = (x @ layer.in_proj.weight.T).split(6, dim=-1)
    padded = F.pad(z, (0, 0, 3, 0))
    z = F.silu(sum(layer.conv.weight[:, i] * padded[:, i : i + 7] for i in range(4)))
    q, k, v, noise = (z @ layer.signal_proj.weight.T).split([3, 3, 6, 6], dim=-1)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    precision = 1 / (F.softplus(noise) + 1e-4)
    rate, step, diffusion = (p.exp() for p in layer.dynamics.parameters())
    decay, noise = (-rate * step)[None], (diffusion / (2 * rate) * (1 - torch.exp(-2 * rate * step)))[None]
    signals = {"precision": precision[:, :, None], "log_decay": decay, "process_noise": noise}
    filtered = kalmix.oracle(designs.KLA, q[:, :, None], k[:, :, None], v[:, :, None], **signals, variance=True)
    inner = filtered.mean[:, :, 0] + layer.skip * z
    expected = (inner * F.silu(gate)) @ layer.out_proj.weight.T
    spread = (filtered.variance[:, :, 0] * F.silu(gate) ** 2) @ (layer.out_proj.weight**2).T
    got = layer.filter(x, variance=True)
    # QK norm adds 1e-6 to the squared length, so that zero keys stay zero: 5e-7 of keys of length 1.
    torch.testing.assert_close(got.mean, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.variance, spread, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [None, 2])
def test_the_block_of_the_language_models(rank):
    """Values are the outputs of the convolution, and the rank is that of the projection to the noise alone."""
    torch.manual_seed(0)
    layer = KLA(6, slots=3, rank=rank, value="conv", initial_skip=-1.0)
    assert (layer.skip == -1).all()
    shake(layer)
    x = torch.randn(2, 7, 6)
    signals, (z, _), _ = layer.signals(x)
    assert torch.equal(signals["v"][:, :, 0], z)
    q, k, code = (z @ layer.signal_proj.weight.T).split([3, 3, rank or 6], dim=-1)
    noise = code if rank is None else code @ layer.value_proj.weight.T
    torch.testing.assert_close(signals["precision"][:, :, 0], 1 / (F.softplus(noise) + 1e-4))
    torch.testing.assert_close(signals["k"][:, :, 0], l2_normalize(k))
    torch.testing.assert_close(signals["q"][:, :, 0], l2_normalize(q))
    for option, wrong in (("value", "z"), ("diffusion", "p"), ("initial_skip", math.nan)):
        with pytest.raises(kalmix.ArgumentError, match=option):
            KLA(6, **{option: wrong})


@pytest.mark.parametrize("width", [6, 2])
def test_a_norm_of_the_read_out(width):
    """The norm takes read-out and skip together, before the gate; its variance uses the expected mean square."""
    torch.manual_seed(0)
    layer = KLA(6, slots=3, norm_width=width)
    assert (layer.norm_scale == 1).all()
    shake(layer)
    x = torch.randn(2, 7, 6)
    read, (z, gate, _) = layer.read(x, variance=True)
    inner = (read.mean + layer.skip * z).unflatten(-1, (-1, width))
    spread, scale = read.variance.unflatten(-1, (-1, width)), layer.norm_scale.unflatten(-1, (-1, width))
    normed = scale * inner / (inner.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    variance = scale.square() * spread / ((inner.square() + spread).mean(-1, keepdim=True) + 1e-5)
    got = layer.filter(x, variance=True)
    torch.testing.assert_close(got.mean, (normed.flatten(-2) * F.silu(gate)) @ layer.out_proj.weight.T)
    expected = (variance.flatten(-2) * F.silu(gate).square()) @ layer.out_proj.weight.square().T
    torch.testing.assert_close(got.variance, expected)
    with pytest.raises(kalmix.ArgumentError, match=r"norm_width.*divisor of 6"):
        KLA(6, norm_width=4)


def test_diffusion_is_a_variance_or_a_deviation():
    """With p = 0.01, the process noise is proportional to p in the authors' code, and to p^2 in equation 8."""
    torch.manual_seed(0)
    variance, deviation = (KLA(6, slots=3, diffusion=name).dynamics for name in ("variance", "deviation"))
    deviation.load_state_dict(variance.state_dict())
    for p in (0.01, 0.5):
        for dynamics in (variance, deviation):
            torch.nn.init.constant_(dynamics.log_diffusion, math.log(p))
        (decay, noise), (same, less) = variance(torch.float32), deviation(torch.float32)
        assert torch.equal(decay, same)
        torch.testing.assert_close(less, p * noise)


@pytest.mark.slow
def test_variance_against_samples():
    """Samples of the read-out, passed through skip, gate and projection, have the variance that `filter` returns."""
    torch.manual_seed(0)
    layer = KLA(8, slots=4)
    shake(layer)
    x = torch.randn(1, 5, 8)
    with torch.no_grad():
        stated = layer.filter(x, variance=True)
        read, context = layer.read(x, variance=True)
        count = 40_000
        samples = torch.cat(
            [
                layer.project_out(
                    torch.stack([sample_gaussian(read.mean, read.variance) for _ in range(1000)]), context
                )
                for _ in range(40)
            ]
        )
    # Outputs are Gaussian: the relative standard error of an estimated variance is sqrt(2 / count); 40 are compared.
    assert ((samples.var(0) / stated.variance - 1).abs() < 5 * math.sqrt(2 / count)).all()
    error = (samples.mean(0) - stated.mean).abs() / (stated.variance / count).sqrt()
    assert (error < 5).all()


def test_sample_without_variance_is_the_mean():
    mean = torch.randn(3, 4)
    variance = torch.zeros(3, 4, requires_grad=True)
    sample = sample_gaussian(mean, variance)
    assert torch.equal(sample, mean)
    sample.sum().backward()
    assert torch.isfinite(variance.grad).all()


@pytest.mark.parametrize("raw", [-80.0, 80.0])
@pytest.mark.parametrize("name", ["log_rate", "log_step", "log_diffusion"])
def test_extreme_dynamics_stay_finite(name, raw):
    torch.manual_seed(0)
    layer = KLA(6, slots=3)
    torch.nn.init.constant_(getattr(layer.dynamics, name), raw)
    got = layer.filter(torch.randn(1, 50, 6), variance=True)
    assert torch.isfinite(got.mean).all() and torch.isfinite(got.variance).all() and (got.variance > 0).all()
    (got.mean.square().sum() + got.variance.sum()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


def test_variance_has_gradients_and_evidence_lowers_it():
    torch.manual_seed(0)
    layer = KLA(8, slots=4)
    x = torch.randn(1, 6, 8)
    layer.filter(x, variance=True).variance.sum().backward()
    for name in ("dynamics.log_rate", "dynamics.log_step", "dynamics.log_diffusion", "signal_proj.weight"):
        assert (layer.get_parameter(name).grad != 0).any(), name
    assert (layer.filter(x, variance=True).belief.belief.variance < 1).all()


def test_dynamics_parameters_are_listed():
    layer = KLA(8)
    marked = {id(p) for p in layer.dynamics_parameters()}
    assert marked == {id(p) for n, p in layer.named_parameters() if n.startswith("dynamics.")}
    assert len(marked) == 3
    assert len(list(KLA(8, process_noise=False).dynamics_parameters())) == 2


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_kernels_agree(kernel):
    torch.manual_seed(0)
    layer = KLA(8, slots=4)
    x = torch.randn(2, 40, 8)
    expected, _ = layer(x)
    layer.kernel = kernel
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-5, atol=1e-6)
