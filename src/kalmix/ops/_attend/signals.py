"""Inputs of the kernels of `attend`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kalmix.ops._attend.dynamics import Dynamics, Weighting


class AttendSignals(NamedTuple):
    """Checked inputs of a kernel: B rows of T tokens, H key heads with C and G value heads with D complex channels.

    Attributes:
        q: queries, `[B, T, H, 2 C]`.
        k: keys, `[B, T, H, 2 C]`.
        v: values, `[B, T, G, 2 D]`.
        times: `[B, T]`; `None` for one unit of time per token.
        key_dynamics: dynamics of keys, tensors `[H]` and `[H, C]`.
        value_dynamics: dynamics of values, tensors `[H]` and `[H, D]`; `None` if they are those of keys.
        weighting: options of the weights and of the mask.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    times: Tensor | None
    key_dynamics: Dynamics
    value_dynamics: Dynamics | None
    weighting: Weighting
