"""Signals of the op `additive`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AdditiveSignals(NamedTuple):
    """Signals of B batch rows of T tokens, with H key heads of width K and G value heads of width V.

    Attributes:
        q, k: `[B, T, H, K]`.
        v: `[B, T, G, V]`.
        log_decay: `[B, T, G]` or `[B, T, G, K]`; no decay if `None`.
        gain: `[B, T, G]`; 1 if `None`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    gain: Tensor | None = None
