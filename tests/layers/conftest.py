"""Small layers, shaken out of their initial values so that every part matters."""

from collections.abc import Callable

import pytest
import torch

from kalmix.layers import KLA, Attention, Mixer

LAYERS: dict[str, Callable[[], Mixer]] = {
    "kla": lambda: KLA(12, slots=4),
    "kla-low-rank": lambda: KLA(12, slots=3, rank=2, expand=2),
    "kla-noise-free": lambda: KLA(12, slots=4, process_noise=False),
    "kla-zoh": lambda: KLA(12, slots=4, discretization="zoh"),
    "attention": lambda: Attention(12, heads=3),
    "attention-grouped": lambda: Attention(16, heads=4, kv_heads=2),
}


def shake(module: torch.nn.Module, size: float = 0.3) -> None:
    """Move every parameter off its initial value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Mixer:
    torch.manual_seed(0)
    made = LAYERS[request.param]()
    shake(made)
    return made
