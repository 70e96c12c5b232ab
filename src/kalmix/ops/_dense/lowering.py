"""Lower a design to `dense`."""

from __future__ import annotations

from torch import Tensor

from kalmix.ops._shared.lowering import Signals
from kalmix.types import belief_dtype


def lower(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Set the process noise of a memory that does not diffuse to 0."""
    return {"process_noise": v.new_zeros((), dtype=belief_dtype(v.dtype)).expand(v.shape[:3])} | signals
