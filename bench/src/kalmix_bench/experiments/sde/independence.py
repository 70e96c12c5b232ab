"""What it costs Adaptive Filter Attention to weigh what it pulls forward as if it were independent.

An observation pulled forward to time t by the dynamics carries the process noise since it was made, and so do all that
were made before it: what they share is counted as often as there are observations. Without process noise there is
nothing to share, and the estimate is that of a Kalman filter with a flat prior.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix_bench.datasets.sde.systems import System


class PooledVariances(NamedTuple):
    """Variances of the estimate at each token, `[T]` float64.

    Attributes:
        claimed: 1 / sum of precisions, what the estimate is said to have.
        actual: its mean squared error.
        optimal: the least that any unbiased linear estimate has: that of a Kalman filter with a flat prior.
    """

    claimed: Tensor
    actual: Tensor
    optimal: Tensor


def pooled_variances(system: System, times: Tensor) -> PooledVariances:
    """The precision-weighted mean of all observations so far, pulled forward (section 2.2), of one real mode.

    Weights are 1 / V(t_i - t_j) with V the variance of an observation pulled forward; no robust weights. A complex mode
    has the same ratios: its rotation is undone. Nothing is drawn: the estimate is linear, so its error is known.

    Args:
        system: of width 1.
        times: `[T]`, non-decreasing.

    Complexity: O(T^3).

    Raises:
        ArgumentError: the system has more than one row.
    """
    if system.dim != 1:
        raise ArgumentError("system", got=f"{system.dim} rows wide", expected="one mode")
    found: list[Tensor] = []
    best, token = torch.zeros((), dtype=torch.float64), torch.arange(len(times))
    for i in range(len(times)):
        matrix, covariance = (x[:, 0, 0] for x in system.transition(times[i] - times[: i + 1]))
        own = system.obs_noise * matrix.square()
        shared = covariance[torch.maximum(token[: i + 1, None], token[: i + 1])]  # the noise since the later of two
        weights = 1 / (covariance + own)
        claimed = 1 / weights.sum()
        actual = claimed.square() * (weights @ shared @ weights + (weights.square() * own).sum())
        if i:
            best = matrix[i - 1].square() * best + covariance[i - 1]
            best = best * system.obs_noise / (best + system.obs_noise)
        else:
            best = own[0]
        found.append(torch.stack([claimed, actual, best]))
    return PooledVariances(*torch.stack(found, 1))
