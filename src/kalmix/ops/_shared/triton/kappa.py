"""Noise that diffusion adds over a lag, and its derivative, as Triton functions."""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.ptx import reciprocal

LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1.1754943508222875e-38)
SERIES_LIMIT = tl.constexpr(0.5)  # if 2 rate lag is smaller, kappa and its derivative are computed as series


@triton.jit
def kappa(rate, lag, decay):
    """Compute the variance that unit process noise adds over a lag."""
    y = 2.0 * rate * lag
    small = tl.minimum(y, SERIES_LIMIT)
    series = -1.0 / 40320 * small + 1.0 / 5040
    series = series * -small + 1.0 / 720
    series = series * -small + 1.0 / 120
    series = series * -small + 1.0 / 24
    series = series * -small + 1.0 / 6
    series = series * -small + 0.5
    series = series * -small + 1.0
    return tl.where(y > SERIES_LIMIT, (1.0 - decay * decay) * (1.0 / tl.maximum(2.0 * rate, TINY)), lag * series)


@triton.jit
def kappa_slope(rate, lag, decay, PTX: tl.constexpr):
    """Compute the derivative of kappa by the rate."""
    y = 2.0 * rate * lag
    small = tl.minimum(y, SERIES_LIMIT)
    series = -1.0 / 45360 * small + 1.0 / 5760
    series = series * -small + 1.0 / 840
    series = series * -small + 1.0 / 144
    series = series * -small + 1.0 / 30
    series = series * -small + 0.125
    series = series * -small + 1.0 / 3
    series = series * small - 0.5
    large = tl.maximum(y, SERIES_LIMIT)
    direct = (decay * decay * (1.0 + large) - 1.0) * reciprocal(large * large, PTX)
    return 2.0 * lag * lag * tl.where(y > SERIES_LIMIT, direct, series)
