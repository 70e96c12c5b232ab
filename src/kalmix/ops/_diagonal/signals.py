"""Signals of the op `diagonal`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DiagonalSignals(NamedTuple):
    """Signals of B batch rows of T tokens, with H key heads of width K and G value heads of width V.

    Attributes:
        q, k: `[B, T, H, K]`.
        v, precision: `[B, T, G, V]`.
        log_decay, process_noise: `[G, K, V]`, or `[B, T, G, K, V]` in "reference".
    """

    q: Tensor
    k: Tensor
    v: Tensor
    precision: Tensor
    log_decay: Tensor
    process_noise: Tensor
