"""Types and helpers of lowerings, which compute the signals of an op from those of a design."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmix.types import belief_dtype
from kalmix.validation import check_dtype_and_device, check_range, check_shape

Signals = dict[str, Any]
LowerFn = Callable[[Tensor, Tensor, Signals], Signals]  # (k, v, signals of a design) -> signals of its op


def pop_positive(name: str, k: Tensor, v: Tensor, signals: Signals, layout: str = "B T G") -> Tensor:
    """Remove a signal from `signals` and return it.

    Args:
        name: name of the signal.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, G, V]`.
        signals: signals by name.
        layout: dimensions of the signal, letters of those of k and v.

    Raises:
        ArgumentError: the signal has another shape, device or dtype, or values that are not positive.
    """
    sizes = dict(zip("BTGVK", (*v.shape, k.shape[3]), strict=True))
    check_shape(name, signals[name], layout, sizes)
    check_dtype_and_device(name, signals[name], (v.dtype, belief_dtype(v.dtype)), v.device)
    check_range(name, signals[name], minimum=torch.finfo(torch.float32).tiny)
    return signals.pop(name)
