"""What a statistician would make of the series of Mauna Loa: a level that drifts and a yearly cycle, by statsmodels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix_bench.datasets.sde.co2 import YEAR, training, weeks
from kalmix_bench.datasets.sde.trajectories import Trajectories


def structural(trajectories: Trajectories) -> Tensor:
    """Predict windows of `co2.windows` by a Kalman filter, `[B, T - 1, 1]`: what comes after all tokens but the last.

    A local linear trend and two harmonics of the year, fitted to the training years by maximum likelihood. The prior
    of a window is how the smoothed states of those years lie about the measurements of their time, so that a window
    may begin in any season. (Durbin and Koopman, Time Series Analysis by State Space Methods, chapter 3.)

    Needs statsmodels. Complexity: seconds.
    """
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    def model(at: Tensor, values: Tensor) -> Any:
        """Of measurements in some weeks, none in others."""
        every = torch.full((int(at[-1]) + 1,), torch.nan, dtype=torch.float64)
        every[at] = values
        cycle = {"period": YEAR, "harmonics": 2}
        options = {"level": "local linear trend", "freq_seasonal": [cycle], "stochastic_freq_seasonal": [False]}
        return UnobservedComponents(every.numpy(), **options)

    times, values = training()
    at = weeks(times)
    fitted = model(at, values).fit(disp=False)
    states = torch.from_numpy(fitted.smoothed_state.T)[at]
    states[:, 0] -= values  # of the level above the measurement, as windows have it
    mean, covariance = states.mean(0), states.T.cov()
    found = []
    for times, measurements in zip(trajectories.times, trajectories.measurements, strict=True):
        one = model(weeks(times), measurements[:, 0])
        one.ssm.initialize_known(mean.numpy(), covariance.numpy())
        found.append(torch.from_numpy(one.filter(fitted.params).forecasts[0])[weeks(times)[1:], None])
    return torch.stack(found)
