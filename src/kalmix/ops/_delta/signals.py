"""Signals of the op `delta`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaSignals(NamedTuple):
    """Signals of B batch rows of T tokens, with H key heads of width K and G value heads of width V.

    Attributes:
        q, k: `[B, T, H, K]`.
        v: `[B, T, G, V]`.
        gain: `[B, T, G]` or `[B, T, G, K]`.
        log_decay: `[B, T, G]` or `[B, T, G, K]`; no decay if `None`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gain: Tensor
    log_decay: Tensor | None = None
