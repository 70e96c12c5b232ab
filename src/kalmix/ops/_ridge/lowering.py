"""Lower a design to `ridge`: its noises become gains."""

from __future__ import annotations

from torch import Tensor

from kalmix.ops._shared.lowering import Signals, pop_positive


def lower(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Compute the gain of a token, the inverse of its noise."""
    return signals | {"gain": 1 / pop_positive("obs_noise", signals)}
