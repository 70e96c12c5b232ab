"""Inputs of the step of cells: a projected token, and the skip connection that the step applies."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RawCellSignals(NamedTuple):
    """Projected token of each row, before norms and activations. The tensors may be views of wider ones.

    Attributes:
        q: query before its unit norm, `[B, 1, S]`, S slots.
        k: key before its unit norm, `[B, 1, S]`.
        v: value, `[B, 1, C]`, C channels.
        noise: input of `softplus_precision`, `[B, 1, C]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    noise: Tensor


class GatedSkip(NamedTuple):
    """Arguments of `gated_skip` beside the read-out: `z` and `gate` `[B, 1, C]`, and `scale` `[C]`."""

    z: Tensor
    scale: Tensor
    gate: Tensor
