"""Conversion of design signals to those of `dense`."""

from __future__ import annotations

from torch import Tensor

from kalmix.ops._shared.lowering import Signals
from kalmix.types import belief_dtype


def lower(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Set the process noise to 0 if the design has none."""
    return {"process_noise": v.new_zeros((), dtype=belief_dtype(v.dtype)).expand(v.shape[:3])} | signals
