"""How good predictions are, how honest a variance is, and a scale from held-out errors that makes it so on average."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kalmix_bench.datasets.sde.trajectories import Trajectories

LEVELS = (0.5, 0.8, 0.9, 0.95)
Errors = dict[str, float]


def squared_errors(predicted: Tensor, trajectories: Trajectories) -> Errors:
    """Mean squared errors a row of predictions `[B, T - 1, d]` of all tokens but the first, each from those before it.

    `measurement`: of what was measured, outliers among it; `state`: of the truth, where it is known.
    """
    truths = {"measurement": trajectories.measurements, "state": trajectories.state}
    return {name: float((predicted - x[:, 1:]).square().mean()) for name, x in truths.items() if x is not None}


def fit_scale(error: Tensor, variance: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """What variances are to be multiplied by: the mean of error^2 / variance, the likeliest scale of Gaussian errors.

    Fit it on trajectories that nothing was learned from, report on others.

    Args:
        error: `[..., d]` of an estimate, real.
        variance: `[...]` claimed for each row of it, positive.
        dim: of `variance`, over which a scale is shared; all if absent.
    """
    return (error.square().mean(-1) / variance).mean(dim)


def coverage(error: Tensor, variance: Tensor, levels: Sequence[float] = LEVELS) -> list[float]:
    """The part of errors inside the central interval of each level of a Gaussian of that variance; honest: the levels.

    Args:
        error: `[..., d]`; variance: `[...]`.
    """
    size = (error / variance[..., None].sqrt()).abs()
    bounds = torch.special.ndtri((1 + torch.tensor(levels, dtype=torch.float64)) / 2)
    return [float((size <= bound).double().mean()) for bound in bounds]
