"""Types and helpers of lowerings, which compute the signals of an op from those of a design."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmix.validation import FLOATS, check_dtype_and_device, check_range

Signals = dict[str, Any]
LowerFn = Callable[[Tensor, Tensor, Signals], Signals]  # (k, v, signals of a design) -> signals of its op


def pop_positive(name: str, signals: Signals) -> Tensor:
    """Remove a signal from `signals` and return it.

    Raises:
        ArgumentError: the signal is not a floating point tensor, or has values that are not positive.
    """
    check_dtype_and_device(name, signals[name], FLOATS, signals[name].device)
    check_range(name, signals[name], minimum=torch.finfo(torch.float32).tiny)
    return signals.pop(name)
