"""Signals that the op `dense` passes to its kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DenseSignals(NamedTuple):
    """Signals of T tokens in B batch rows, with H key heads of width K and G value heads of width V.

    Attributes:
        q, k: `[B, T, H, K]`.
        v: `[B, T, G, V]`.
        obs_noise, process_noise: `[B, T, G]`.
        log_decay: `[B, T, G]`, `[B, T, G, K]`, or `[B, T, G, K / 2]` with angles; no decay if `None`.
        angle: `[B, T, G, K / 2]`; no rotation if `None`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    obs_noise: Tensor
    process_noise: Tensor
    log_decay: Tensor | None = None
    angle: Tensor | None = None
