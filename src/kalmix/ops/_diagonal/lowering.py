"""Lowering of designs to `diagonal`."""

from __future__ import annotations

from torch import Tensor

from kalmix.ops._shared.lowering import Signals
from kalmix.types import belief_dtype


def lower(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Add a log-decay or process noise of zeros if the design has none."""
    zeros = v.new_zeros((), dtype=belief_dtype(v.dtype)).expand(v.shape[2], k.shape[3], v.shape[3])
    return {"log_decay": zeros, "process_noise": zeros} | signals
