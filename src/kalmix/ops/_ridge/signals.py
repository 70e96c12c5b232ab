"""Signals that the op `ridge` passes to its kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RidgeSignals(NamedTuple):
    """Signals of T tokens in B batch rows, with H key heads of width K and G value heads of width V.

    Attributes:
        q, k: `[B, T, H, K]`.
        v: `[B, T, G, V]`.
        log_decay: `[B, T, G]`; no decay if `None`.
        gain, mix: `[B, T, G]`; 1 if `None`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    gain: Tensor | None = None
    mix: Tensor | None = None
