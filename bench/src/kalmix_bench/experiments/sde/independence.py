"""Error of Adaptive Filter Attention caused by treating propagated observations as independent.

An observation propagated to time t carries the process noise since its own time. Earlier observations carry this noise
too, so it is counted several times. Without process noise the estimate equals that of a Kalman filter with a flat
prior.
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
        claimed: 1 / sum of precisions, the variance that the estimate claims.
        actual: its mean squared error.
        optimal: the lowest mean squared error of any unbiased linear estimate, that of a Kalman filter with a flat
            prior.
    """

    claimed: Tensor
    actual: Tensor
    optimal: Tensor


def pooled_variances(system: System, times: Tensor) -> PooledVariances:
    """Compute variances of the precision-weighted mean of all propagated observations (section 2.2), for one real mode.

    Weights are 1 / V(t_i - t_j), with V the variance of a propagated observation, without robust weights. A complex
    mode
    has the same ratios, because its rotation is undone. The estimate is linear, so its error is computed without
    sampling.

    Args:
        system: system of dimension 1.
        times: `[T]`, non-decreasing.

    Complexity: O(T^3).

    Raises:
        ArgumentError: the system has more than one dimension.
    """
    if system.dim != 1:
        raise ArgumentError("system", problem=f"has {system.dim} dimensions", expected="one dimension")
    rows: list[Tensor] = []
    best, token = torch.zeros((), dtype=torch.float64), torch.arange(len(times))
    for i in range(len(times)):
        matrix, covariance = (x[:, 0, 0] for x in system.transition(times[i] - times[: i + 1]))
        own_noise = system.obs_noise * matrix.square()
        shared = covariance[
            torch.maximum(token[: i + 1, None], token[: i + 1])
        ]  # noise shared since the later of two observations
        weights = 1 / (covariance + own_noise)
        claimed = 1 / weights.sum()
        actual = claimed.square() * (weights @ shared @ weights + (weights.square() * own_noise).sum())
        if i:
            best = matrix[i - 1].square() * best + covariance[i - 1]
            best = best * system.obs_noise / (best + system.obs_noise)
        else:
            best = own_noise[0]
        rows.append(torch.stack([claimed, actual, best]))
    return PooledVariances(*torch.stack(rows, 1))
