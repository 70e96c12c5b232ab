"""Translation of the signals of a design to those of `attend`."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.ops._shared.lowering import Signals


def lower(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Return the signals, which are those of the op, with a process noise of 0 for a design without diffusion."""
    return {"process_noise": torch.zeros_like(signals["key_noise"])} | signals
