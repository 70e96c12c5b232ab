"""The signals of the op `attend`, and how they are weighed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kalmix.ops._attend.dynamics import Dynamics, Weighting


class AttendSignals(NamedTuple):
    """Signals of B rows of T tokens, for H key heads of C complex channels and G value heads of D.

    Attributes:
        q, k: `[B, T, H, 2 C]`.
        v: `[B, T, G, 2 D]`.
        times: `[B, T]`; one unit a token if `None`.
        keys: dynamics of keys, `[H]` and `[H, C]`.
        values: dynamics of values, `[H]` and `[H, D]`; those of keys if `None`.
        weighing: how tokens are weighed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    times: Tensor | None
    key_dynamics: Dynamics
    value_dynamics: Dynamics | None
    weighting: Weighting
