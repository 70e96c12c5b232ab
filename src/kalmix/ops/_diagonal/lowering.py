"""Lower a design to `diagonal`."""

from __future__ import annotations

from torch import Tensor

from kalmix.ops._shared.lowering import Signals
from kalmix.types import belief_dtype


def lower(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Set the log-decay of a state that holds still, and the noise of one that does not diffuse, to 0."""
    still = v.new_zeros((), dtype=belief_dtype(v.dtype)).expand(v.shape[2], k.shape[3], v.shape[3])
    return {"log_decay": still, "process_noise": still} | signals
