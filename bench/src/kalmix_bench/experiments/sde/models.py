"""Models that learn to predict the next measurement.

A model sees measurements embedded in D channels, their times, and how long after each the next one is made, in mean
intervals between measurements; token by token it gives that next one, in D channels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kalmix.layers import AdaptiveFilterAttention, RadialTangentialAttention, RecurrentFilterAttention
from kalmix.layers.trajectory_base import TrajectoryLayer

PERIODS = (1.0, 1000.0)  # of the embedding of time, the shortest and the longest


class Predictor(nn.Module):
    """A model of this task. It takes `x` `[B, T, D]`, `times` and `ahead` `[B, T]`: when, and how long to the next."""

    @abstractmethod
    def forward(self, x: Tensor, times: Tensor, ahead: Tensor) -> Tensor:
        """What is measured next after each token, `[B, T, D]`."""

    @abstractmethod
    def maps(self, x: Tensor, times: Tensor, ahead: Tensor) -> Tensor:
        """How much of each token (column) is in what is made at another (row), by layer, `[layers, B, T, T]`."""


class SoftmaxAttention(Predictor):
    """Layers of PyTorch's attention, each of the normed input and added to it; times are embedded and added first.

    Args:
        width: D.
        heads: of each layer.
        layers: one or more.
    """

    rates: Tensor

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        low, high = (math.log10(2 * math.pi / period) for period in reversed(PERIODS))
        self.register_buffer("rates", torch.logspace(low, high, width // 4))
        self.position = nn.Linear(4 * (width // 4), width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(layers))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, times: Tensor, ahead: Tensor) -> Tensor:
        """What is measured next after each token, `[B, T, D]`."""
        return self.out(self._attend(x, times, ahead, weights=False)[0])

    def maps(self, x: Tensor, times: Tensor, ahead: Tensor) -> Tensor:
        """Attention weights, a mean over heads, `[layers, B, T, T]`."""
        return torch.stack(self._attend(x, times, ahead, weights=True)[1])

    def _attend(self, x: Tensor, times: Tensor, ahead: Tensor, weights: bool) -> tuple[Tensor, list[Tensor]]:
        angle = torch.cat([when[..., None] * self.rates for when in (times, ahead)], -1)
        x = x + self.position(torch.cat([angle.sin(), angle.cos()], -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        maps = []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = norm(x)
            found, seen = layer(y, y, y, attn_mask=later, is_causal=not weights, need_weights=weights)
            x = x + found
            maps.append(seen)
        return x, maps


class FilterPredictor(Predictor):
    """One layer whose tokens are looks at a trajectory, told when they were seen."""

    def __init__(self, layer: TrajectoryLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, times: Tensor, ahead: Tensor) -> Tensor:
        """What is measured next after each token, `[B, T, D]`."""
        return self.layer(x, times=times, horizon=ahead)[0]

    def maps(self, x: Tensor, times: Tensor, ahead: Tensor) -> Tensor:
        """What each token is in an estimate, a mean over heads, `[1, B, T, T]`; `[0, ...]` where that is no number."""
        maps = self.layer.attention_map(x, times)
        return x.new_zeros(0, *x.shape[:2], x.shape[1]) if maps is None else maps.mean(1)[None]

    def propagate(self, x: Tensor, times: Tensor, at: int) -> Tensor:
        """What each token up to number `at` says, alone, of what is seen then, `[B, at + 1, D]`."""
        past = slice(at + 1)
        return self.layer.predict_from_token(x[:, past], times[:, at, None] - times[:, past])


def _filtering(layer: Callable[..., TrajectoryLayer]) -> Callable[[int, int], Predictor]:
    """As the paper has it: as many complex channels as the embedding has real ones."""
    return lambda width, heads: FilterPredictor(layer(width, heads=heads, head_dim=width // heads))


MODELS: dict[str, Callable[[int, int], Predictor]] = {  # of D and the number of heads
    "afa": _filtering(AdaptiveFilterAttention),
    "rt-afa": _filtering(RadialTangentialAttention),
    "recurrent-afa": _filtering(RecurrentFilterAttention),
    "softmax": lambda width, heads: SoftmaxAttention(width, heads, 1),
    "softmax-2": lambda width, heads: SoftmaxAttention(width, heads, 2),
}
