"""Weekly carbon dioxide at Mauna Loa, 1958 to 2001, with its gaps: a real series at irregular times."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.tasks.sde.trajectories import Splits, Trajectories

SHARES = (0.7, 0.15)  # of the measurements, to train and to validate; the rest, the latest, are the test
DAYS = 365.25


def series() -> tuple[Tensor, Tensor]:
    """Times in years since the first measurement, and parts per million, `[2225]` float64; weeks without are left out.

    Needs statsmodels, which has the series; nothing is downloaded.
    """
    from statsmodels.datasets import co2

    table: Any = co2.load_pandas().data
    weeks = table["co2"].dropna()
    days = (weeks.index - weeks.index[0]).days.to_numpy()
    return torch.tensor(days, dtype=torch.float64) / DAYS, torch.tensor(weeks.to_numpy(), dtype=torch.float64)


def windows(length: int = 64, weeks: int = 128, stride: int = 8, seed: int = 0) -> Splits:
    """Windows of so many successive weeks of the series, split by time, of which `length` are kept, `[B, length, 1]`.

    No measurement is in two splits. Which are kept (the first always is) is drawn anew for every window, so that times
    are irregular everywhere, not only in the early years, where the gaps are. What is measured is how far it is above
    the first of its window, so that a window is not told by how much carbon dioxide there was in its decade, in
    standard deviations of that in training. `times` start at 0 in every window.

    Raises:
        ArgumentError: more are to be kept than there are, or a split is shorter than a window.
    """
    if not 1 <= length <= weeks:
        raise ArgumentError("length", got=length, needs=f"between 1 and the {weeks} weeks of a window")
    times, values = series()
    ends = [round(share * len(times)) for share in (SHARES[0], sum(SHARES), 1.0)]
    if min(stop - start for start, stop in pairwise([0, *ends])) < weeks:
        raise ArgumentError("weeks", got=weeks, needs="no more than the shortest split has")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for start, stop in pairwise([0, *ends]):
        whole = times[start:stop].unfold(0, weeks, stride), values[start:stop].unfold(0, weeks, stride)
        order = torch.rand(whole[0].shape, generator=generator)
        order[:, 0] = -1
        kept = order.argsort(1)[:, :length].sort(1).values
        found.append([x.gather(1, kept) - x[:, :1] for x in whole])
    scale = found[0][1].std()
    return Splits(*(Trajectories(time, (rise / scale)[..., None]) for time, rise in found))
