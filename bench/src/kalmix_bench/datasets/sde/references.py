"""What can be known of a trajectory at best: the Kalman filter and smoother that know the system, by statsmodels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix_bench.datasets.sde.systems import System


class Gaussian(NamedTuple):
    """A Gaussian a token: `mean` `[B, T, d]` and `covariance` `[B, T, d, d]`, float64."""

    mean: Tensor
    covariance: Tensor


class KalmanEstimates(NamedTuple):
    """What is known of the state at each token.

    Attributes:
        predicted: from the tokens before it; at the first token the prior. Of a measurement the mean is the same, and
            the covariance larger by the noise.
        filtered: from these and its own.
        smoothed: from all.
    """

    predicted: Gaussian
    filtered: Gaussian
    smoothed: Gaussian


def kalman(system: System, times: Tensor, measurements: Tensor, noise: Tensor | None = None) -> KalmanEstimates:
    """Filter and smooth measurements (Kalman; Rauch, Tung and Striebel), taking the prior for Gaussian.

    Args:
        times: `[B, T]`.
        measured: `[B, T, d]`.
        noise: `[B, T]` the variance of each measurement, the system's if absent: who knows the outliers knows this.

    Needs statsmodels. Complexity: O(B T d^3).
    """
    from statsmodels.tsa.statespace.kalman_smoother import KalmanSmoother

    count, length, width = measurements.shape
    matrix, covariance = system.transition(times.diff(dim=1, append=times[:, -1:]))
    noise = torch.full_like(times, system.obs_noise) if noise is None else noise
    found: list[Any] = []
    for one in range(count):
        model = KalmanSmoother(width, width, nobs=length)
        model["design"] = model["selection"] = torch.eye(width, dtype=torch.float64).numpy()
        model["transition"] = matrix[one].movedim(0, -1).numpy()
        model["state_cov"] = covariance[one].movedim(0, -1).numpy()
        model["obs_cov"] = (noise[one] * torch.eye(width, dtype=torch.float64)[..., None]).numpy()
        model.initialize_known(torch.zeros(width, dtype=torch.float64).numpy(), system.prior().numpy())
        model.bind(measurements[one].contiguous().numpy())
        found.append(model.smooth())

    def collected(name: str) -> Gaussian:  # statsmodels has time last, and a prediction behind the end
        means, covariances = (
            torch.stack([torch.from_numpy(getattr(one, f"{name}_state{kind}")) for one in found]).movedim(-1, 1)
            for kind in ("", "_cov")
        )
        return Gaussian(means[:, :length], covariances[:, :length])

    return KalmanEstimates(*map(collected, KalmanEstimates._fields))
