"""Trajectories of a system, sampled in time with noise, and their embedding in more dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.analysis.diffusions import root
from kalmix.errors import ArgumentError
from kalmix_bench.datasets.sde.systems import System


@dataclass(frozen=True)
class Sampling:
    """Measurement times and outliers; the defaults are the paper's.

    Attributes:
        length: T, measurements per trajectory.
        interval: time between measurements.
        irregular: draw intervals from an exponential distribution with mean `interval` (a Poisson process), different
            in
            each trajectory. Times are multiples of the step if the system has one.
        outliers: probability that a measurement is an outlier; the first is never one.
        outlier_scale: standard deviation of outliers relative to other measurements.

    Raises:
        ArgumentError: a number is out of range.
    """

    length: int = 102
    interval: float = 0.1
    irregular: bool = False
    outliers: float = 0.0
    outlier_scale: float = 20.0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ArgumentError("length", got=self.length, expected="at least 1")
        if not self.interval > 0:
            raise ArgumentError("interval", got=self.interval, expected="a positive number")
        if not 0 <= self.outliers <= 1:
            raise ArgumentError("outliers", got=self.outliers, expected="a probability from 0 to 1")

    def times(self, count: int, generator: torch.Generator, step: float | None = None) -> Tensor:
        """Return times of `count` trajectories, `[B, T]` float64, starting at 0; multiples of `step` if given."""
        gaps = torch.full((count, self.length - 1), self.interval, dtype=torch.float64)
        if self.irregular:
            gaps = torch.empty_like(gaps).exponential_(1 / self.interval, generator=generator)
        times = torch.nn.functional.pad(gaps.cumsum(1), (1, 0))
        return times if step is None else (times / step).round() * step


class Trajectories(NamedTuple):
    """B trajectories of T measurements, float64.

    Attributes:
        times: `[B, T]`, non-decreasing.
        measurements: `[B, T, d]`.
        state: `[B, T, d]`, true states; `None` if unknown.
        is_outlier: `[B, T]` bool; `None` if unknown.
    """

    times: Tensor
    measurements: Tensor
    state: Tensor | None = None
    is_outlier: Tensor | None = None

    def select(self, index: Tensor) -> Trajectories:
        """Return the trajectories of these indices."""
        return Trajectories(
            self.times[index], self.measurements[index], *(x if x is None else x[index] for x in self[2:])
        )


class Splits(NamedTuple):
    """Independent trajectories for training, validation and test."""

    train: Trajectories
    validation: Trajectories
    test: Trajectories


def splits(system: System, sampling: Sampling, sizes: tuple[int, int, int], seed: int) -> Splits:
    """Draw the trajectories of each split. A split does not depend on the sizes of the others or on the device."""
    generators = (torch.Generator().manual_seed(3 * seed + part) for part in range(3))
    parts = (simulate(system, sampling, size, draw) for size, draw in zip(sizes, generators, strict=True))
    return Splits(*parts)


def simulate(system: System, sampling: Sampling, count: int, generator: torch.Generator) -> Trajectories:
    """Draw trajectories; between measurements the state moves by its exact Gaussian transition, or by Euler's method.

    Args:
        system: system to simulate.
        sampling: measurement times and outliers.
        count: B.
        generator: CPU generator.

    Complexity: O(B T d^3), sequential in T.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    times = sampling.times(count, generator, system.step)
    matrix, covariance = system.transition(times.diff(dim=1))
    pushed = (root(covariance) @ normal(count, sampling.length - 1, system.dim, 1))[..., 0]
    low, high = system.start
    length = low + (high - low) * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    states = [length * torch.nn.functional.normalize(normal(count, system.dim), dim=-1)]
    for t in range(sampling.length - 1):
        states.append((matrix[:, t] @ states[-1][..., None])[..., 0] + pushed[:, t])
    state = torch.stack(states, 1)
    is_outlier = torch.rand(times.shape, generator=generator, dtype=torch.float64) < sampling.outliers
    is_outlier[:, 0] = False
    scale = system.obs_noise**0.5 * torch.where(is_outlier, sampling.outlier_scale, 1.0)
    return Trajectories(times, state + scale[..., None] * normal(*state.shape), state, is_outlier)


def embedding(width: int, channels: int, seed: int) -> Tensor:
    """Return orthonormal rows in random directions, `[d, D]` float64: `x @ m` embeds a state, `y @ m.mT` recovers it.

    Norms and squared errors are preserved.

    Raises:
        ArgumentError: D is below d.
    """
    if channels < width:
        raise ArgumentError("channels", got=channels, expected=f"at least {width} (the width of a measurement)")
    matrix = torch.randn(channels, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(matrix).Q.mT
