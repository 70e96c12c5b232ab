"""Layers of kalmix with other initial values, for comparison. Importing this module makes their names available."""

from __future__ import annotations

import math

import torch

from kalmix.layers import MIXERS, BayesianLayer, Mixer
from kalmix.layers.parametrize import StepDynamics

SLOWER = 16  # factor by which initial rates are lower: uniform in (0, 1) instead of (0, 16)


class SlowDynamics(StepDynamics):
    """Rates and steps of a `StepDecay` whose initial rates are lower by `SLOWER`."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.log_rate.sub_(math.log(SLOWER))


class SlowBayesianLayer(BayesianLayer):
    """Bayesian Layer whose memory initially lasts `SLOWER` times as long.

    Args:
        hidden_size: D.
        heads, head_dim, expand_v: those of `BayesianLayer`.
        decays_per_head: that of `BayesianLayer`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        decays_per_head: int | str | None = 1,
    ) -> None:
        sizes = {"heads": heads, "head_dim": head_dim, "expand_v": expand_v}
        super().__init__(hidden_size, **sizes, decays_per_head=decays_per_head)
        rates, steps = (math.prod(shape) for shape in (self.decay.rates, self.decay.steps))
        self.decay.dynamics = SlowDynamics(rates, steps, min_rate=0.0, rotates=False)


VARIANTS: dict[str, type[Mixer]] = {"bayesian-slow": SlowBayesianLayer}
MIXERS.update(VARIANTS)
