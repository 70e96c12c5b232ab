"""Optimal estimates of a trajectory: Kalman filter and smoother with the true system, by statsmodels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix_bench.datasets.sde.systems import System


class Gaussian(NamedTuple):
    """Gaussian per token: `mean` `[B, T, d]` and `covariance` `[B, T, d, d]`, float64."""

    mean: Tensor
    covariance: Tensor


class KalmanEstimates(NamedTuple):
    """Estimates of the state at each token.

    Attributes:
        predicted: given the tokens before it; the prior at the first token. The next measurement has the same mean, and
            a covariance larger by the noise.
        filtered: given the tokens up to it.
        smoothed: given all tokens.
    """

    predicted: Gaussian
    filtered: Gaussian
    smoothed: Gaussian


def kalman(system: System, times: Tensor, measurements: Tensor, noise: Tensor | None = None) -> KalmanEstimates:
    """Run the Kalman filter and the Rauch-Tung-Striebel smoother, with a Gaussian prior.

    Args:
        system: true system.
        times: `[B, T]`.
        measured: `[B, T, d]`.
        noise: `[B, T]` variance of each measurement; the system's by default. Pass larger ones at known outliers.

    Needs statsmodels. Complexity: O(B T d^3).
    """
    from statsmodels.tsa.statespace.kalman_smoother import KalmanSmoother

    count, length, width = measurements.shape
    matrix, covariance = system.transition(times.diff(dim=1, append=times[:, -1:]))
    noise = torch.full_like(times, system.obs_noise) if noise is None else noise
    results: list[Any] = []
    for one in range(count):
        model = KalmanSmoother(width, width, nobs=length)
        model["design"] = model["selection"] = torch.eye(width, dtype=torch.float64).numpy()
        model["transition"] = matrix[one].movedim(0, -1).numpy()
        model["state_cov"] = covariance[one].movedim(0, -1).numpy()
        model["obs_cov"] = (noise[one] * torch.eye(width, dtype=torch.float64)[..., None]).numpy()
        model.initialize_known(torch.zeros(width, dtype=torch.float64).numpy(), system.prior().numpy())
        model.bind(measurements[one].contiguous().numpy())
        results.append(model.smooth())

    def collected(name: str) -> Gaussian:  # statsmodels has time last, and one more prediction at the end
        means, covariances = (
            torch.stack([torch.from_numpy(getattr(one, f"{name}_state{kind}")) for one in results]).movedim(-1, 1)
            for kind in ("", "_cov")
        )
        return Gaussian(means[:, :length], covariances[:, :length])

    return KalmanEstimates(*map(collected, KalmanEstimates._fields))
