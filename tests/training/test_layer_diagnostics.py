"""Diagnostics of layers: attention maps are derivatives, variances are those of the read-out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kalmix import ops
from kalmix.analysis.layer_diagnostics import diagnose_layers
from kalmix.layers import MIXERS, Mixer
from kalmix.models import LanguageModel

WIDTH, TOKENS = 8, 7
SAYING = {
    "kla": {"slots": 3},
    "bayesian": {"heads": 2, "head_dim": 4},
    "gated-kalmanet": {"heads": 2, "head_dim": 4},
}
LINEAR = SAYING | {
    "deltanet": {"heads": 2},
    "gla": {"heads": 2},
    "linear-attention": {"heads": 2},
    "mamba2": {"heads": 2, "head_dim": 4, "state_dim": 3},
}


def shaken(name: str, **options: object) -> Mixer:
    torch.manual_seed(0)
    mixer = MIXERS[name](WIDTH, **options).double()
    for parameter in mixer.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return mixer


def jacobian(mixer: Mixer, x: Tensor) -> Tensor:
    """Compute the derivative of each column of the read-out by the same column of the values: `[columns, T, T]`."""
    if hasattr(mixer, "project"):
        q, k, v, _ = mixer.project(x, None, None, None)
        moved = torch.autograd.functional.jacobian(lambda v: mixer.op(q, k, v, **mixer.signals(x)).mean[0], v)
    else:
        signals = mixer.signals(x)[0]
        v = signals.pop("v")
        moved = torch.autograd.functional.jacobian(lambda v: ops.diagonal(v=v, **signals).mean[0], v)
    moved = moved[:, :, :, 0].detach()  # [T, G, V, T, G, V]
    own = moved.diagonal(dim1=1, dim2=4).diagonal(dim1=1, dim2=3)  # [T, T, G, V]
    assert torch.allclose(own.square().sum(), moved.square().sum())  # columns are independent
    return own.permute(2, 3, 0, 1)


@pytest.mark.parametrize("name", LINEAR)
def test_attention_map_is_the_derivative_of_the_mean_by_the_values(name: str):
    mixer = shaken(name, **LINEAR[name])
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        (found,) = mixer.attention_map(x)
    exact = jacobian(mixer, x)
    if name == "kla":
        torch.testing.assert_close(found, exact[0])
    else:  # all columns of a head have the same map
        torch.testing.assert_close(found[:, None].expand_as(exact), exact)
    assert found.abs().amax((1, 2)).min() > 1e-3


def test_diagnostics_of_every_layer_with_a_posterior():
    """Check the variances of the read-out and of the output, in the order of the layers."""
    layers = ["kla", "deltanet", "attention", {"mixer": "bayesian", "heads": 2}, "recurrent-afa"]
    torch.manual_seed(0)
    model, ids = LanguageModel(11, 16, layers).eval(), torch.randint(11, (TOKENS,))
    embedded = model.embed_tokens(ids)
    hidden, found = diagnose_layers(model.layers, embedded, weights=True)
    assert [insight.name for insight in found] == ["layer 1", "layer 4", "layer 5"]
    output = model(embedded[None], output_beliefs=True)
    torch.testing.assert_close(hidden, output.hidden_state[0])
    for insight, place in zip(found, (0, 3, 4), strict=True):
        mixer, signal = model.mixers[place], output.mixer_inputs[place]
        (_, variance, _), context = mixer.read(signal, None, None, True)
        torch.testing.assert_close(insight.variance, variance[0].float())
        torch.testing.assert_close(insight.output, mixer.project_out_variance(variance, context)[0].mean(-1).float())
        assert (insight.variance >= 0).all()
    kla, bayesian, trajectory = found
    assert kla.weights.shape == (16, TOKENS, TOKENS) and bayesian.weights.shape == (2, TOKENS, TOKENS)
    assert trajectory.gain is trajectory.weights is None
    assert diagnose_layers(model.layers, embedded)[1][0].weights is None


@pytest.mark.parametrize("name", SAYING)
def test_write_gain_decreases_for_repeated_tokens(name: str):
    """A repeated token reduces the variance less, and never to 0."""
    mixer = shaken(name, **SAYING[name]).float()
    x = torch.randn(2, 1, WIDTH).expand(2, 20, WIDTH)
    with torch.no_grad():
        found = mixer.write_gain(x)
        torch.testing.assert_close(mixer.write_gain(x[1:]), found[1:])
    assert found.shape == (2, 20) and ((found > 0) & (found < 1)).all()
    assert (found[:, -1] < found[:, 5]).all()  # after the convolution's four taps are filled


@pytest.mark.parametrize("name", ["deltanet", "linear-attention", "attention", "afa", "recurrent-afa"])
def test_layers_without_a_covariance_have_no_write_gain(name: str):
    assert MIXERS[name](WIDTH).write_gain(torch.randn(1, 3, WIDTH)) is None


def test_attention_map_of_softmax_attention_rebuilds_its_readout():
    mixer = MIXERS["attention"](16, heads=4, kv_heads=2)
    x = torch.randn(2, TOKENS, 16)
    with torch.no_grad():
        read, maps, values = mixer.read(x)[0].mean, mixer.attention_map(x), mixer._heads(x)[2]
    assert maps.shape == (2, 4, TOKENS, TOKENS) and (maps.triu(1) == 0).all()
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, TOKENS))
    found = torch.einsum("bhts,bshc->bthc", maps, values.repeat_interleave(2, 2))
    torch.testing.assert_close(found.flatten(2), read, rtol=1e-5, atol=1e-6)
