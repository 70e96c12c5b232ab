"""Models that predict the next measurement.

Inputs are measurements embedded in D channels, their times, and the time to the next measurement (in mean intervals).
The output at each token is the next measurement in D channels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kalmix.layers import AdaptiveFilterAttention, RadialTangentialAttention, RecurrentFilterAttention
from kalmix.layers.trajectory_base import TrajectoryLayer

PERIODS = (1.0, 1000.0)  # shortest and longest period of the time embedding


class Predictor(nn.Module):
    """Base class of the models.

    Inputs are `x` `[B, T, D]`, `times` `[B, T]`, and `horizon` `[B, T]`, the time to the next token.
    """

    @abstractmethod
    def forward(self, x: Tensor, times: Tensor, horizon: Tensor) -> Tensor:
        """Return the prediction of the next measurement at each token, `[B, T, D]`."""

    @abstractmethod
    def maps(self, x: Tensor, times: Tensor, horizon: Tensor) -> Tensor:
        """Return attention weights of each token (column) in each estimate (row), by layer, `[layers, B, T, T]`."""


class SoftmaxAttention(Predictor):
    """Pre-norm residual layers of PyTorch's attention; an embedding of the times is added to the input.

    Args:
        width: D.
        heads: heads per layer.
        layers: number of layers.
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

    def forward(self, x: Tensor, times: Tensor, horizon: Tensor) -> Tensor:
        """Return the prediction of the next measurement at each token, `[B, T, D]`."""
        return self.out(self._attend(x, times, horizon, weights=False)[0])

    def maps(self, x: Tensor, times: Tensor, horizon: Tensor) -> Tensor:
        """Return attention weights, averaged over heads, `[layers, B, T, T]`."""
        return torch.stack(self._attend(x, times, horizon, weights=True)[1])

    def _attend(self, x: Tensor, times: Tensor, horizon: Tensor, weights: bool) -> tuple[Tensor, list[Tensor]]:
        angle = torch.cat([when[..., None] * self.rates for when in (times, horizon)], -1)
        x = x + self.position(torch.cat([angle.sin(), angle.cos()], -1))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        maps = []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = norm(x)
            output, attention = layer(y, y, y, attn_mask=future, is_causal=not weights, need_weights=weights)
            x = x + output
            maps.append(attention)
        return x, maps


class FilterPredictor(Predictor):
    """Model of one filtering layer, which receives the times of the measurements."""

    def __init__(self, layer: TrajectoryLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, times: Tensor, horizon: Tensor) -> Tensor:
        """Return the prediction of the next measurement at each token, `[B, T, D]`."""
        return self.layer(x, times=times, horizon=horizon)[0]

    def maps(self, x: Tensor, times: Tensor, horizon: Tensor) -> Tensor:
        """Return attention weights, averaged over heads, `[1, B, T, T]`; `[0, ...]` if the layer's are not scalars."""
        maps = self.layer.attention_map(x, times)
        return x.new_zeros(0, *x.shape[:2], x.shape[1]) if maps is None else maps.mean(1)[None]

    def propagate(self, x: Tensor, times: Tensor, at: int) -> Tensor:
        """Return the estimate of measurement `at` from each token up to it alone, `[B, at + 1, D]`."""
        past = slice(at + 1)
        return self.layer.predict_from_token(x[:, past], times[:, at, None] - times[:, past])


def _filtering(layer: Callable[..., TrajectoryLayer]) -> Callable[[int, int], Predictor]:
    """Return a constructor with as many complex channels as the embedding has real ones, as in the paper."""
    return lambda width, heads: FilterPredictor(layer(width, heads=heads, head_dim=width // heads))


MODELS: dict[str, Callable[[int, int], Predictor]] = {  # functions of D and the number of heads
    "afa": _filtering(AdaptiveFilterAttention),
    "rt-afa": _filtering(RadialTangentialAttention),
    "recurrent-afa": _filtering(RecurrentFilterAttention),
    "softmax": lambda width, heads: SoftmaxAttention(width, heads, 1),
    "softmax-2": lambda width, heads: SoftmaxAttention(width, heads, 2),
}
