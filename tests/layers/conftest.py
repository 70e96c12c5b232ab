"""Small layers with perturbed parameters, so that every part affects the output."""

from collections.abc import Callable

import pytest
import torch

from kalmix import designs
from kalmix.layers import (
    GLA,
    KDA,
    KLA,
    AdaptiveFilterAttention,
    AFATransformerBlock,
    Attention,
    BayesianLayer,
    ControlledFilter,
    DeltaNet,
    DesignLayer,
    GatedDeltaNet,
    GatedKalmaNet,
    LinearAttention,
    Mamba2,
    Mixer,
    RadialTangentialAttention,
    RecurrentFilterAttention,
    RetNet,
)
from kalmix.ops import Fixed

LAYERS: dict[str, Callable[[], Mixer]] = {
    "kla": lambda: KLA(12, slots=4),
    "kla-low-rank": lambda: KLA(12, slots=3, rank=2, expand=2),
    "kla-norm": lambda: KLA(12, slots=3, norm_width=6),
    "kla-conv": lambda: KLA(12, slots=3, rank=2, value="conv", diffusion="deviation", initial_skip=-1.0),
    "kla-noise-free": lambda: KLA(12, slots=4, process_noise=False),
    "kla-zoh": lambda: KLA(12, slots=4, discretization="zoh"),
    "bayesian": lambda: BayesianLayer(12, heads=2, head_dim=3),
    "bayesian-decay-per-key": lambda: BayesianLayer(12, heads=2, head_dim=3, decays_per_head="key"),
    "bayesian-turning": lambda: BayesianLayer(12, heads=2, head_dim=3, groups=3, rotations=True, conv=0),
    "deltanet": lambda: DeltaNet(12, heads=2, head_dim=3, negative_eigenvalues=True),
    "gated-deltanet": lambda: GatedDeltaNet(12, heads=4, key_heads=2, head_dim=3),
    # A ridge of 0.1 magnifies rounding errors by at most 11 (its condition number); the published 0.02 by 51.
    "gated-kalmanet": lambda: GatedKalmaNet(12, heads=4, key_heads=2, head_dim=3, ridge=0.1),
    "gated-kalmanet-bare": lambda: GatedKalmaNet(
        12, heads=2, head_dim=3, expand_v=2, decay=False, gain=None, mix=False, gate=None, ridge=Fixed(0.25)
    ),
    "afa": lambda: AdaptiveFilterAttention(12, heads=2, head_dim=3, predict=None),
    "afa-parts": lambda: AdaptiveFilterAttention(
        12, iterations=2, value_dynamics=True, window=4, floor=True, normalize=True, predict="gate", confidence=True
    ),
    "rt-afa": lambda: RadialTangentialAttention(12, heads=2, head_dim=3),
    "rt-afa-parts": lambda: RadialTangentialAttention(12, window=4, predict="gate"),
    "recurrent-afa": lambda: RecurrentFilterAttention(12, heads=2, head_dim=3, iterations=2, predict="gate"),
    "controlled-afa": lambda: ControlledFilter(12, heads=2, head_dim=3, rank=2, window=4),
    "afa-transformer": lambda: AFATransformerBlock(12, window=4),
    "kda": lambda: KDA(12, heads=2, head_dim=3, expand_v=2, conv=2),
    "linear-attention": lambda: LinearAttention(12, heads=2),
    "retnet": lambda: RetNet(12, heads=3),
    "gla": lambda: GLA(12, heads=2, conv=3, rank=2),
    "mamba2": lambda: Mamba2(12, heads=4, groups=2, state_dim=5),
    "design-cells": lambda: DesignLayer(12, design=designs.KLA, heads=2, head_dim=3),
    "design-columns": lambda: DesignLayer(12, design="longhorn", heads=2, head_dim=3, gate=None),
    "attention": lambda: Attention(12, heads=3),
    "attention-narrow": lambda: Attention(12, heads=2, kv_heads=1, head_dim=4),
    "attention-grouped": lambda: Attention(16, heads=4, kv_heads=2),
}


def shake(module: torch.nn.Module, size: float = 0.3) -> None:
    """Add noise to every parameter."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Mixer:
    torch.manual_seed(0)
    made = LAYERS[request.param]()
    shake(made)
    return made
