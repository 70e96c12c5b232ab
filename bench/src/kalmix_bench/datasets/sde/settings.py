"""Prediction tasks: the paper's system with several noises, irregular times and outliers, and a real series."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kalmix_bench.datasets.sde import co2
from kalmix_bench.datasets.sde.references import kalman
from kalmix_bench.datasets.sde.scores import Errors, squared_errors
from kalmix_bench.datasets.sde.structural import structural
from kalmix_bench.datasets.sde.systems import SPIRAL, System
from kalmix_bench.datasets.sde.trajectories import Sampling, Splits, Trajectories, splits

PUBLISHED = Sampling()  # regular, without outliers


@dataclass(frozen=True)
class SimulatedSetting:
    """Task on trajectories of a system."""

    system: System
    sampling: Sampling = PUBLISHED

    def draw(self, sizes: tuple[int, int, int], seed: int) -> Splits:
        """Draw so many training, validation and test trajectories."""
        return splits(self.system, self.sampling, sizes, seed)

    def references(self, trajectories: Trajectories) -> dict[str, Errors]:
        """Compute errors of predictors that learn nothing: last measurement, and Kalman filters with the true system.

        The smoother estimates the state from all measurements. With outliers, "kalman" expects none, "kalman, mean
        noise" has the variance of all measurements, the best of a linear filter, and "kalman, known outliers" knows
        which measurements are outliers.
        """
        assert trajectories.state is not None and trajectories.is_outlier is not None
        known = kalman(self.system, trajectories.times, trajectories.measurements)
        errors = _last(trajectories) | {
            "kalman": squared_errors(known.predicted.mean[:, 1:], trajectories),
            "smoother": {"state": float((known.smoothed.mean - trajectories.state)[:, 1:].square().mean())},
        }
        if self.sampling.outliers:
            larger = torch.where(trajectories.is_outlier, self.sampling.outlier_scale**2, 1.0).double()
            mean = torch.full_like(larger, 1 + self.sampling.outliers * (self.sampling.outlier_scale**2 - 1))
            for name, factor in (("mean noise", mean), ("known outliers", larger)):
                noise = self.system.obs_noise * factor
                found = kalman(self.system, trajectories.times, trajectories.measurements, noise)
                errors[f"kalman, {name}"] = squared_errors(found.predicted.mean[:, 1:], trajectories)
        return errors

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as JSON-compatible values."""
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True)
class CarbonDioxideSetting:
    """Task on the series of Mauna Loa."""

    def draw(self, sizes: tuple[int, int, int], seed: int) -> Splits:
        """Return all windows; the seed determines which weeks are left out."""
        return co2.windows(seed=seed)

    def references(self, trajectories: Trajectories) -> dict[str, Errors]:
        """Compute errors of the last measurement and of a structural model of the series."""
        return _last(trajectories) | {"structural": squared_errors(structural(trajectories), trajectories)}

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as JSON-compatible values."""
        return {"series": "co2"}


def _last(trajectories: Trajectories) -> dict[str, Errors]:
    return {"last": squared_errors(trajectories.measurements[:, :-1], trajectories)}


def _paper(process_noise: float, obs_noise: float, sampling: Sampling = PUBLISHED) -> SimulatedSetting:
    return SimulatedSetting(System(SPIRAL, process_noise, obs_noise, step=0.01), sampling)


SETTINGS: Mapping[str, SimulatedSetting | CarbonDioxideSetting] = {
    "figure-1a": _paper(0.0, 1.0),
    "figure-1b": _paper(0.3, 0.5),
    "figure-1c": _paper(0.5, 2.0),
    "noisy": _paper(0.0, 4.0),  # as in the author's published notebook
    "irregular": _paper(0.3, 0.5, Sampling(irregular=True)),
    "outliers": _paper(0.3, 0.5, Sampling(outliers=0.12)),
    "co2": CarbonDioxideSetting(),
}
