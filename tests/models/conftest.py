"""Tiny models: attention only (GPT), KLA only, hybrids, and every other layer."""

import pytest
import torch

from kalmix.designs import Covariance, Design, Evidence, Transition
from kalmix.models import KalmixConfig, KalmixForCausalLM, hybrid_layers
from kalmix.ops import Chebyshev, Fixed

VOCABULARY = 40
DESIGN = Design("own", Transition("head", diffusion=True), Evidence("memory"), Covariance("dense"))
# An output norm amplifies read-outs near 0 and their rounding errors; a larger epsilon limits this.
CALM = {"heads": 1, "head_dim": 8, "norm_eps": 0.01}
# A linear system amplifies rounding by its condition number: 3 at this ridge, 51 at the published 0.02 (test_exact.py).
RIDGE = {"mixer": "gated-kalmanet", **CALM, "ridge": 0.5}
LAYERS = {
    "gpt": ["attention", {"mixer": "attention", "heads": 4, "kv_heads": 2}],
    "kla": ["kla", {"mixer": "kla", "slots": 4, "mlp": 24}],
    "hybrid": [{"mixer": "attention", "heads": 2}, "kla"],
    "bayesian": [{"mixer": "bayesian", **CALM}, {"mixer": "bayesian", **CALM, "rotations": True, "mlp": 8}],
    "ridge": [RIDGE, {**RIDGE, "gain": "squared", "solver": Chebyshev(20), "ridge": Fixed(0.5)}],
    "ridge-hybrid": hybrid_layers(RIDGE, blocks=2, attention_at=[1]),
    "filters": [{"mixer": "afa", "window": 5, "iterations": 2, "value_dynamics": True}, "recurrent-afa"],
    "directions": [{"mixer": "rt-afa", "predict": "gate"}, "afa-transformer"],
    "delta": [{"mixer": "gated-deltanet", **CALM}, {"mixer": "kda", **CALM}],
    "ungated": [{"mixer": "deltanet", **CALM}, "linear-attention"],
    "additive": [{"mixer": "retnet", **CALM}, {"mixer": "gla", **CALM, "conv": 2}],
    "space": [{"mixer": "mamba2", "state_dim": 6}, {"mixer": "design", "design": DESIGN, **CALM}],
}


def build(layers: str | list = "hybrid", seed: int = 0, **options) -> KalmixForCausalLM:
    """Build a model in evaluation mode whose parameters all differ from their initial values."""
    torch.manual_seed(seed)
    entries = LAYERS[layers] if isinstance(layers, str) else layers
    options = {"vocab_size": VOCABULARY, "hidden_size": 16, "pad_token_id": 0, **options}
    model = KalmixForCausalLM(KalmixConfig(layers=entries, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Return random token ids `[batch, length]` without the padding id 0."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=LAYERS)
def model(request: pytest.FixtureRequest) -> KalmixForCausalLM:
    return build(request.param)
