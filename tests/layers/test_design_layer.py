"""Layers made from designs."""

import pytest
import torch

from kalmix import designs
from kalmix.designs import Covariance, Design, Evidence, Transition
from kalmix.layers import GLA, KDA, KLA, BayesianLayer, DesignLayer, GatedDeltaNet, GatedKalmaNet, Mamba2, RetNet

from .test_memory import D, made, projected, unit


def test_design_layer_equals_gated_deltanet():
    """The design of Gated DeltaNet has the gain reset / (noise + reset); at equal noises the layer is the paper's."""
    torch.manual_seed(0)
    paper, x = made(GatedDeltaNet(D, heads=2, head_dim=3, expand_v=1))
    layer, _ = made(DesignLayer(D, design="gated-deltanet", heads=2, head_dim=3))
    shared = {n: w for n, w in paper.state_dict().items() if "gain_proj" not in n}
    assert not layer.load_state_dict(shared, strict=False).unexpected_keys
    for name, noise in layer.variances.items():
        torch.nn.init.zeros_(noise.proj.weight)
        torch.nn.init.constant_(noise.bias, {"reset": 0.3, "obs_noise": 0.3}[name])
    torch.nn.init.zeros_(paper.gain_proj.weight)
    squares = unit(projected(paper, x)[1]).square().sum(-1)  # a little less than 1
    assert (1 - squares < 1e-4).all()
    torch.testing.assert_close(layer(x)[0], paper(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in designs.CATALOGUE if name != "afa"])
def test_every_design_is_a_layer(name):
    """Build each design by name, by value and by mapping."""
    design = designs.CATALOGUE[name]
    config = {part: vars(getattr(design, part)) for part in ("transition", "evidence", "covariance")}
    answers = []
    for given in (name, design, config):
        torch.manual_seed(0)
        layer = DesignLayer(D, design=given, heads=2, head_dim=3)
        x = torch.randn(1, 4, D, generator=torch.Generator().manual_seed(1))
        found = layer.filter(x, variance=True)
        assert (found.variance is not None) == design.has_variance == layer.has_posterior
        answers.append(found.mean)
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("paper", [BayesianLayer, GatedDeltaNet, GatedKalmaNet, GLA, KDA, KLA, Mamba2, RetNet])
def test_design_layers_have_the_dynamics_of_the_papers_layer(paper):
    """Rates of memories without process noise are no dynamics: they learn at the full rate."""
    layer = DesignLayer(D, design=paper.design, heads=2, head_dim=3)
    assert any(True for _ in layer.dynamics_parameters()) == any(True for _ in paper(D).dynamics_parameters())


@pytest.mark.parametrize("decay", ["none", "cell"])
@pytest.mark.parametrize("diffusion", [False, True])
def test_cell_designs_learn_only_the_dynamics_they_need(decay, diffusion):
    """A design without decay or diffusion has no parameters for them."""
    design = Design("cells", Transition(decay, diffusion), Evidence("cell"), Covariance("diagonal"))
    layer, x = made(DesignLayer(D, design=design, heads=2, head_dim=3))
    layer(x)[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
