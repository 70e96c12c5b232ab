"""Update of the independent cells of `diagonal` by one token, for the steps of ops and of layers."""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - Triton's interpreter looks for it

CELLS = 512  # cells of a program


@triton.jit
def update_cells(mean, variance, decay, noise, key, value, weight):
    """Predict and update cells; return their mean and variance. `weight` is the precision of the observations."""
    predicted = decay * mean
    variance = decay * decay * variance + noise
    weighted_key = key * weight
    variance = variance / (1.0 + key * weighted_key * variance)
    return predicted + variance * weighted_key * (value - key * predicted), variance
