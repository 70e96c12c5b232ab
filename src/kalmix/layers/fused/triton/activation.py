"""Activations and their derivatives in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr):
    """Return silu(x), sigmoid(x) or x, and its derivative; `KIND` is "silu", "sigmoid" or "none"."""
    if KIND == "none":
        value, slope = x, tl.full(x.shape, 1.0, tl.float32)
    else:
        weight = tl.sigmoid(x)
        slope = weight * (1.0 - weight)
        value = weight
        if KIND == "silu":
            value, slope = x * weight, weight + x * slope
    return value, slope
