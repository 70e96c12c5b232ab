"""Lowering of designs to `additive`: converts noises to gains."""

from __future__ import annotations

from torch import Tensor

from kalmix.ops._shared.lowering import Signals, pop_positive


def lower(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Compute the gain omega = write_variance / (write_variance + r^2) of equation 19 of Memory by Design."""
    variance, noise = pop_positive("write_variance", k, v, signals), pop_positive("obs_noise", k, v, signals)
    return signals | {"gain": 1 / (1 + noise / variance)}  # in this form, gradients do not cancel
