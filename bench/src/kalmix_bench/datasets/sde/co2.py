"""Weekly carbon dioxide at Mauna Loa, 1958 to 2001, with gaps: a real time series at irregular times."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix_bench.datasets.sde.trajectories import Splits, Trajectories

SHARES = (0.7, 0.15)  # fractions for training and validation; the latest measurements are for tests
YEAR = 365.25 / 7  # in weeks
SPREAD = 3.0  # in parts per million; about the standard deviation of the rise within a window


def series() -> tuple[Tensor, Tensor]:
    """Return times in years since the first measurement, and parts per million, each `[2225]` float64, without gaps.

    Needs statsmodels, which contains the series; nothing is downloaded.
    """
    from statsmodels.datasets import co2

    table: Any = co2.load_pandas().data
    observed = table["co2"].dropna()
    days = (observed.index - observed.index[0]).days.to_numpy()
    return torch.tensor(days, dtype=torch.float64) / (7 * YEAR), torch.tensor(observed.to_numpy(), dtype=torch.float64)


def weeks(times: Tensor) -> Tensor:
    """Return the week index of each time in years, int64."""
    return (times * YEAR).round().long()


def training() -> tuple[Tensor, Tensor]:
    """Return times and values of the training years; values are divided by `SPREAD`."""
    times, values = series()
    stop = _ends(len(times))[0]
    return times[:stop], values[:stop] / SPREAD


def windows(length: int = 64, span: int = 128, stride: int = 8, seed: int = 0) -> Splits:
    """Return windows of the series as `[B, length, 1]`, split by time into training, validation and test.

    A window covers `span` successive measurements, of which a random subset of `length` is used, the first always. So
    times
    are irregular in all years. No measurement is in two splits. Values are differences to the first of the window,
    divided
    by `SPREAD`, so that the level of the decade does not identify a window. Times start at 0 in every window.

    Args:
        length: measurements used per window.
        span: measurements covered by a window.
        stride: measurements between the starts of two windows.
        seed: seed of the subsets.

    Raises:
        ArgumentError: `length` exceeds `span`, or a split is shorter than a window.
    """
    if not 1 <= length <= span:
        raise ArgumentError("length", got=length, expected=f"from 1 to {span} (`span`)")
    times, values = series()
    parts = list(pairwise([0, *_ends(len(times))]))
    shortest = min(stop - start for start, stop in parts)
    if shortest < span:
        raise ArgumentError("span", got=span, expected=f"at most {shortest} (measurements of the shortest split)")
    generator = torch.Generator().manual_seed(seed)
    splits = []
    for start, stop in parts:
        segments = times[start:stop].unfold(0, span, stride), values[start:stop].unfold(0, span, stride) / SPREAD
        order = torch.rand(segments[0].shape, generator=generator)
        order[:, 0] = -1
        index = order.argsort(1)[:, :length].sort(1).values
        time, rise = (x.gather(1, index) - x[:, :1] for x in segments)
        splits.append(Trajectories(time, rise[..., None]))
    return Splits(*splits)


def _ends(count: int) -> list[int]:
    """Return the end index of each split."""
    return [round(share * count) for share in (SHARES[0], sum(SHARES), 1.0)]
