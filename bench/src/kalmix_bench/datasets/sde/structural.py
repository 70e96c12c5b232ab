"""Structural time series model of the Mauna Loa series (drifting level and yearly cycle), by statsmodels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix_bench.datasets.sde.co2 import YEAR, training, weeks
from kalmix_bench.datasets.sde.trajectories import Trajectories


def structural(trajectories: Trajectories) -> Tensor:
    """Predict the next measurement of windows of `co2.windows` with a Kalman filter, `[B, T - 1, 1]`.

    The model is a local linear trend with two harmonics of the year, fitted to the training years by maximum likelihood
    (Durbin and Koopman, Time Series Analysis by State Space Methods, chapter 3). The prior of a window is the
    distribution
    of the smoothed training states relative to the measurement of their time, because a window may start in any season.

    Needs statsmodels. Complexity: seconds.
    """
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    def model(at: Tensor, values: Tensor) -> Any:
        """Return the model of a weekly series with gaps."""
        series = torch.full((int(at[-1]) + 1,), torch.nan, dtype=torch.float64)
        series[at] = values
        cycle = {"period": YEAR, "harmonics": 2}
        options = {"level": "local linear trend", "freq_seasonal": [cycle], "stochastic_freq_seasonal": [False]}
        return UnobservedComponents(series.numpy(), **options)

    times, values = training()
    at = weeks(times)
    fit = model(at, values).fit(disp=False)
    states = torch.from_numpy(fit.smoothed_state.T)[at]
    states[:, 0] -= values  # windows are relative to a measurement
    mean, covariance = states.mean(0), states.T.cov()
    forecasts = []
    for times, measurements in zip(trajectories.times, trajectories.measurements, strict=True):
        one = model(weeks(times), measurements[:, 0])
        one.ssm.initialize_known(mean.numpy(), covariance.numpy())
        forecasts.append(torch.from_numpy(one.filter(fit.params).forecasts[0])[weeks(times)[1:], None])
    return torch.stack(forecasts)
