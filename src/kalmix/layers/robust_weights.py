"""Learned robust weights and gates of layers that filter trajectories."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.layers.fused.trajectory_step import RawWeights, can_fuse_parameters, step_parameters
from kalmix.layers.modules import is_plain
from kalmix.layers.parametrize import STATE_VARIANCES, StateDynamics, positive
from kalmix.types import belief_dtype


class RobustWeights(nn.Module):
    """Learned parameters of the robust attention weights of `kalmix.ops.attend`, `[H]` or `[H, parts]` each.

    nu and the temperature are learned as logarithms (see `positive`).

    Args:
        heads: H.
        nu: initial value: the squared residual, in units of its variance, at which a token's weight is halved. A tuple
            gives one value per part.
        floor: whether to learn a number >= 0, initially 0.01, that is added to the decay of keys.
        temperature: its initial value, of all parts.
    """

    def __init__(
        self, heads: int, nu: float | tuple[float, ...], floor: bool = False, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.nu = nu
        parts = len(nu) if isinstance(nu, tuple) else 0
        self.log_nu: nn.Parameter = nn.Parameter(torch.empty(heads, parts) if parts else torch.empty(heads))
        self.log_temperature: nn.Parameter = nn.Parameter(torch.empty(heads, parts) if parts else torch.empty(heads))
        self.floor: nn.Parameter | None = nn.Parameter(torch.empty(heads)) if floor else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values; see the class."""
        with torch.no_grad():
            self.log_nu.copy_(torch.tensor(self.nu).log())
        nn.init.constant_(self.log_temperature, math.log(self.temperature))
        if self.floor is not None:
            nn.init.constant_(self.floor, math.log(math.expm1(0.01)))

    def raw(self) -> RawWeights:
        """Return the learned parameters."""
        return RawWeights(self.log_nu, self.log_temperature, self.floor)

    def forward(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the arguments `nu`, `temperature` and, if learned, `floor`."""
        arguments = {"nu": positive(self.log_nu.to(dtype)), "temperature": positive(self.log_temperature.to(dtype))}
        return arguments if self.floor is None else arguments | {"floor": F.softplus(self.floor.to(dtype))}


def attend_parameters(x: Tensor, dynamics: StateDynamics, weights: RobustWeights | None) -> dict[str, Tensor]:
    """Return the arguments of `kalmix.ops.attend` that depend on parameters only.

    One kernel computes them on a GPU.

    Args:
        x: any signal of the layer; its dtype and device count.
        dynamics: dynamics of keys or of values.
        weights: parameters of the weights; `None` for the dynamics only.
    """
    raw, raw_weights = dynamics.raw(), None if weights is None else weights.raw()
    plain = is_plain(dynamics, StateDynamics) and (weights is None or is_plain(weights, RobustWeights))
    if plain and raw is not None and can_fuse_parameters(x, (*raw, *(raw_weights or ()))):
        process, key, query = (variance["floor"] for variance in STATE_VARIANCES.values())
        computed, arguments = step_parameters(raw, raw_weights, (process, key, query), dynamics.channels)
        return computed._asdict() | arguments
    dtype = belief_dtype(x.dtype)
    return dynamics(dtype)._asdict() | ({} if weights is None else weights(dtype))


class ConfidenceGate(nn.Module):
    """Gate of the estimate by its precision (Attention as an Adaptive Filter, appendix B.2).

    The gate is sigmoid(w log(precision) + b) per head and token. The logarithm is used because the precision grows with
    the number of tokens. Initially w = 1 and b = 2: the gate is 0.5 at a precision of 0.14.

    Args:
        heads: H.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.bias: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values; see the class."""
        nn.init.ones_(self.weight)
        nn.init.constant_(self.bias, 2.0)

    def forward(self, variance: Tensor) -> Tensor:
        """Return the gate `[B, T, H, 1]` for the variance (1 / precision) in that shape; 1 where the variance is 0."""
        log_variance = variance.clamp(min=torch.finfo(variance.dtype).tiny).log()[..., 0]
        return torch.sigmoid(self.bias - self.weight * log_variance)[..., None]


class PredictionGate(nn.Module):
    """Gate between the estimate and its prediction, per token and channel (end of section 3.1 of the paper).

    g = sigmoid(a' log(1 + |r|^2) + b), where r `[C]` is the estimate minus the token's own value. Initially a = 0 and
    b = 2: mostly the prediction.

    Args:
        heads: H.
        channels: C.
    """

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(heads, channels))
        self.bias: nn.Parameter = nn.Parameter(torch.empty(heads, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values; see the class."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, 2.0)

    def forward(self, estimate: Tensor, observed: Tensor) -> Tensor:
        """Return the gate `[B, T, H, C]` for an estimate and an observed value, `[B, T, H, 2 C]` each."""
        real, imaginary = (estimate - observed).chunk(2, -1)
        innovation = torch.log1p(real.square() + imaginary.square())
        return torch.sigmoid((innovation * self.weight).sum(-1, keepdim=True) + self.bias)
