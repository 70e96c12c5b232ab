"""Errors of predictions, coverage of variances, and a scale of variances fitted to held-out errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kalmix_bench.datasets.sde.trajectories import Trajectories

LEVELS = (0.5, 0.8, 0.9, 0.95)
Errors = dict[str, float]


def squared_errors(predicted: Tensor, trajectories: Trajectories) -> Errors:
    """Compute mean squared errors of predictions `[B, T - 1, d]` of all tokens but the first.

    Returns:
        "measurement": against the measurements, outliers included; "state": against the true states, if known.
    """
    truths = {"measurement": trajectories.measurements, "state": trajectories.state}
    return {name: float((predicted - x[:, 1:]).square().mean()) for name, x in truths.items() if x is not None}


def fit_scale(error: Tensor, variance: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the factor that calibrates variances: the mean of error^2 / variance, the maximum-likelihood scale.

    Fit it on held-out trajectories and report on others.

    Args:
        error: `[..., d]`, real.
        variance: `[...]`, claimed variance of each component, positive.
        dim: dimensions of `variance` that share a scale; all by default.
    """
    return (error.square().mean(-1) / variance).mean(dim)


def coverage(error: Tensor, variance: Tensor, levels: Sequence[float] = LEVELS) -> list[float]:
    """Return the fraction of errors within the central Gaussian interval of each level.

    For calibrated variances the fractions equal the levels.

    Args:
        error: `[..., d]`.
        variance: `[...]`.
        levels: probabilities of the intervals.
    """
    size = (error / variance[..., None].sqrt()).abs()
    bounds = torch.special.ndtri((1 + torch.tensor(levels, dtype=torch.float64)) / 2)
    return [float((size <= bound).double().mean()) for bound in bounds]
