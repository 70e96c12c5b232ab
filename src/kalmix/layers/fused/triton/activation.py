"""Activations and their derivatives in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.ptx import exp2, reciprocal

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr, PTX: tl.constexpr = False):
    """Return silu(x), sigmoid(x) or x, and its derivative; `KIND` is "silu", "sigmoid" or "none"."""
    if KIND == "none":
        value, slope = x, tl.full(x.shape, 1.0, tl.float32)
    else:
        weight = reciprocal(1.0 + exp2(x * -LOG2_E, PTX), PTX) if PTX else tl.sigmoid(x)
        slope = weight * (1.0 - weight)
        value = weight
        if KIND == "silu":
            value, slope = x * weight, weight + x * slope
    return value, slope
