"""Weekly carbon dioxide at Mauna Loa, 1958 to 2001, with its gaps: a real series at irregular times."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix_bench.datasets.sde.trajectories import Splits, Trajectories

SHARES = (0.7, 0.15)  # of the measurements, to train and to validate; the rest, the latest, are the test
YEAR = 365.25 / 7  # weeks
SPREAD = 3.0  # parts per million: about the standard deviation of what windows rise by


def series() -> tuple[Tensor, Tensor]:
    """Times in years since the first measurement, and parts per million, `[2225]` float64; weeks without are left out.

    Needs statsmodels, which has the series; nothing is downloaded.
    """
    from statsmodels.datasets import co2

    table: Any = co2.load_pandas().data
    observed = table["co2"].dropna()
    days = (observed.index - observed.index[0]).days.to_numpy()
    return torch.tensor(days, dtype=torch.float64) / (7 * YEAR), torch.tensor(observed.to_numpy(), dtype=torch.float64)


def weeks(times: Tensor) -> Tensor:
    """Which week each time in years is, int64."""
    return (times * YEAR).round().long()


def training() -> tuple[Tensor, Tensor]:
    """The training years as they were, times and values over `SPREAD`."""
    times, values = series()
    stop = _ends(len(times))[0]
    return times[:stop], values[:stop] / SPREAD


def windows(length: int = 64, span: int = 128, stride: int = 8, seed: int = 0) -> Splits:
    """Windows of `span` successive measurements of the series, split by time, `length` of them kept, `[B, length, 1]`.

    No measurement is in two splits. Which are kept (the first always is) is drawn anew for every window, so that times
    are irregular everywhere, not only in the early years, where the gaps are. What is measured is how far it is above
    the first of its window, over `SPREAD`, so that a window is not told by how much carbon dioxide there was in its
    decade. `times` start at 0 in every window.

    Raises:
        ArgumentError: more are to be kept than there are, or a split is shorter than a window.
    """
    if not 1 <= length <= span:
        raise ArgumentError("length", got=length, expected=f"between 1 and the {span} of a window")
    times, values = series()
    parts = list(pairwise([0, *_ends(len(times))]))
    if min(stop - start for start, stop in parts) < span:
        raise ArgumentError("span", got=span, expected="no more than the shortest split has")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for start, stop in parts:
        whole = times[start:stop].unfold(0, span, stride), values[start:stop].unfold(0, span, stride) / SPREAD
        order = torch.rand(whole[0].shape, generator=generator)
        order[:, 0] = -1
        kept = order.argsort(1)[:, :length].sort(1).values
        time, rise = (x.gather(1, kept) - x[:, :1] for x in whole)
        found.append(Trajectories(time, rise[..., None]))
    return Splits(*found)


def _ends(count: int) -> list[int]:
    """Where each split ends."""
    return [round(share * count) for share in (SHARES[0], sum(SHARES), 1.0)]
