"""Types of a lowering, and a check that several lowerings share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmix.validation import FLOATS, check_dtype_and_device, check_range

Signals = dict[str, Any]
Lower = Callable[[Tensor, Tensor, Signals], Signals]  # (k, v, signals of a design) -> signals of its op


def pop_positive(name: str, signals: Signals) -> Tensor:
    """Remove a signal that must be positive, and return it."""
    check_dtype_and_device(name, signals[name], FLOATS, signals[name].device)
    check_range(name, signals[name], minimum=torch.finfo(torch.float32).tiny)
    return signals.pop(name)
