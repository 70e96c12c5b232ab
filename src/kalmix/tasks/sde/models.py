"""Models that learn to predict the next measurement.

A model sees measurements embedded in D channels, their times, and how long after each the next one is made; token by
token it gives that next one, in D channels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

PERIODS = (0.1, 100.0)  # of the embedding of time, the shortest and the longest: an interval, and ten trajectories


class Predictor(nn.Module):
    """A model of this task. It takes `x` `[B, T, D]`, `times` and `ahead` `[B, T]`: when, and how long to the next."""

    @abstractmethod
    def forward(self, x: Tensor, times: Tensor, ahead: Tensor) -> Tensor:
        """What is measured next after each token, `[B, T, D]`."""

    @abstractmethod
    def maps(self, x: Tensor, times: Tensor, ahead: Tensor) -> Tensor:
        """How much of each token (column) is in what is made at another (row), by layer, `[layers, B, T, T]`."""


class SoftmaxAttention(Predictor):
    """Layers of PyTorch's attention, each added to its input, over an additive embedding of the times (section 4.3).

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
        for layer in self.layers:
            found, seen = layer(x, x, x, attn_mask=later, is_causal=not weights, need_weights=weights)
            x = x + found
            maps.append(seen)
        return x, maps


MODELS: dict[str, Callable[[int, int], Predictor]] = {  # of D and the number of heads
    "softmax": lambda width, heads: SoftmaxAttention(width, heads, 1),
    "softmax-2": lambda width, heads: SoftmaxAttention(width, heads, 2),
}
