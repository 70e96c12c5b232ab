"""What heads learn that filter trajectories, beside dynamics: how they doubt, how they trust, how far they look."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.layers.parametrize import positive


class RobustWeights(nn.Module):
    """How heads doubt what they see, learned: arguments of ops, `[H]` each, or `[H, parts]` where nu has parts.

    Args:
        heads: H.
        nu: the residual, in variances, that halves a token's weight, at first.
        floor: whether there is a number >= 0, at first 0.01, that is added to the decay of keys.

    The temperature of scores is 1 at first. It and nu are learned as logarithms (see `positive`).
    """

    def __init__(self, heads: int, nu: float | tuple[float, ...], floor: bool = False) -> None:
        super().__init__()
        self.nu = nu
        parts = len(nu) if isinstance(nu, tuple) else 0
        self.log_nu: nn.Parameter = nn.Parameter(torch.empty(heads, parts) if parts else torch.empty(heads))
        self.log_temperature: nn.Parameter = nn.Parameter(torch.empty(heads, parts) if parts else torch.empty(heads))
        self.floor: nn.Parameter | None = nn.Parameter(torch.empty(heads)) if floor else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initial values above."""
        with torch.no_grad():
            self.log_nu.copy_(torch.tensor(self.nu).log())
        nn.init.zeros_(self.log_temperature)
        if self.floor is not None:
            nn.init.constant_(self.floor, math.log(math.expm1(0.01)))

    def forward(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """`nu`, `temperature` and, if there is one, `floor`."""
        arguments = {"nu": positive(self.log_nu.to(dtype)), "temperature": positive(self.log_temperature.to(dtype))}
        return arguments if self.floor is None else arguments | {"floor": F.softplus(self.floor.to(dtype))}


class ConfidenceGate(nn.Module):
    """A gate a head and token, of how much was seen (appendix B.2): sigmoid(w log(total precision) + b).

    Of the logarithm, as the precision itself grows with the length of what was seen. Initially w = 1 and b = 2: shut
    by half where the precision is 0.14.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.bias: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initial values above."""
        nn.init.ones_(self.weight)
        nn.init.constant_(self.bias, 2.0)

    def forward(self, variance: Tensor) -> Tensor:
        """The gate `[B, T, H, 1]`, given one over the total precision in the same shape; 1 where that is 0."""
        log_variance = variance.clamp(min=torch.finfo(variance.dtype).tiny).log()[..., 0]
        return torch.sigmoid(self.bias - self.weight * log_variance)[..., None]


class PredictionGate(nn.Module):
    """How much of a prediction, how much of the estimate to give, a token and channel (the end of section 3.1).

    g = sigmoid(a' log(1 + |r|^2) + b), with r what the estimate differs by from what the token itself shows, `[C]`.
    Initially a = 0 and b = 2: a prediction, mostly.
    """

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(heads, channels))
        self.bias: nn.Parameter = nn.Parameter(torch.empty(heads, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initial values above."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, 2.0)

    def forward(self, estimate: Tensor, observed: Tensor) -> Tensor:
        """The gate `[B, T, H, C]`, given both as `[B, T, H, 2 C]`."""
        real, imaginary = (estimate - observed).chunk(2, -1)
        innovation = torch.log1p(real.square() + imaginary.square())
        return torch.sigmoid((innovation * self.weight).sum(-1, keepdim=True) + self.bias)
