"""From raw parameters, any real number, to signals a filter admits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.layers.mixer import check_choice
from kalmix.types import belief_dtype

_KNEE = 8.0
DISCRETIZATIONS = ("ou", "zoh")


def positive(raw: Tensor) -> Tensor:
    """A positive number that cannot die: exp(raw) for |raw| <= 8, a power of |raw| beyond.

    `exp` and `softplus` underflow to 0 in float32 near raw = -104, and `exp` overflows near 88; from there no gradient
    leads back. Here the logarithm itself grows only like 8 log |raw| past the knee (value and slope are continuous),
    so at |raw| = 80 the value is e^26.4 or its inverse, at 1000 e^46.6, and d log value / d raw = 8 / |raw|.
    """
    size = raw.abs()
    bent = raw.sign() * _KNEE * (1 + (size.clamp(min=_KNEE) / _KNEE).log())
    return torch.where(size <= _KNEE, raw, bent).exp()


def observation_precision(raw: Tensor, floor: float = 1e-4) -> Tensor:
    """Precision 1 / (softplus(raw) + floor) of a value: positive and at most 1 / floor; float32 inside."""
    return 1 / (F.softplus(raw.to(belief_dtype(raw.dtype))) + floor)


def discretize_ou(rate: Tensor, diffusion: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """The Ornstein-Uhlenbeck process dz = -rate z dt + c dW, observed every `step`: exact, equation 8.

    Args:
        rate: mean reversion alpha > 0, per unit time.
        diffusion: c squared (the paper's parameter), >= 0, variance per unit time.
        step: time dt > 0 between tokens.

    Returns:
        log_decay = -alpha dt and process_noise = c^2 (1 - exp(-2 alpha dt)) / (2 alpha).
    """
    return -rate * step, diffusion * (-torch.expm1(-2 * rate * step) / (2 * rate))


def discretize_zoh(rate: Tensor, diffusion: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Zero-order hold: the same decay, but noise c^2 dt whatever the decay (the ablation of Figure 3b)."""
    return -rate * step, diffusion * step


class CellDynamics(nn.Module):
    """Learned, time-invariant dynamics of every cell (slot, channel): a decay and a process noise per token.

    Raw parameters are logarithms (see `positive`) of the rate alpha (initially 1), the step dt (log-uniform in
    [0.001, 0.1]) and the diffusion c^2 (0.01; absent without process noise), each `[slots, channels]`.
    """

    def __init__(self, slots: int, channels: int, discretization: str = "ou", process_noise: bool = True) -> None:
        super().__init__()
        check_choice("discretization", discretization, DISCRETIZATIONS)
        self.discretization = discretization
        self.log_rate = nn.Parameter(torch.empty(slots, channels))
        self.log_step = nn.Parameter(torch.empty(slots, channels))
        self.log_diffusion = nn.Parameter(torch.empty(slots, channels)) if process_noise else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The paper's initial values (appendix G.2)."""
        nn.init.zeros_(self.log_rate)
        nn.init.uniform_(self.log_step, math.log(0.001), math.log(0.1))
        if self.log_diffusion is not None:
            nn.init.constant_(self.log_diffusion, math.log(0.01))

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """log_decay <= 0 and process_noise >= 0, `[1, slots, channels]`, in the dtype of a belief."""
        rate, step = positive(self.log_rate.to(dtype)), positive(self.log_step.to(dtype))
        if self.log_diffusion is None:
            return (-rate * step)[None], torch.zeros_like(rate)[None]
        discretize = discretize_ou if self.discretization == "ou" else discretize_zoh
        log_decay, noise = discretize(rate, positive(self.log_diffusion.to(dtype)), step)
        return log_decay[None], noise[None]
