"""Conversion of design signals to those of `ridge`: gains from observation noises."""

from __future__ import annotations

from torch import Tensor

from kalmix.ops._shared.lowering import Signals, pop_positive


def lower(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Replace `obs_noise` by its inverse, `gain`."""
    return signals | {"gain": 1 / pop_positive("obs_noise", k, v, signals)}
