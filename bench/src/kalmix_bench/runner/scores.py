"""Mean and standard error of scores over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple


class Score(NamedTuple):
    """Mean over seeds and its standard error, which is NaN for one seed."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """Compute the score from one value per seed."""
        return cls(mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan)

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if math.isnan(self.error) else f" ± {100 * self.error:.1f}")
