"""Lowering of designs to `delta`: converts noises to gains."""

from __future__ import annotations

from torch import Tensor

from kalmix.ops._shared.lowering import Signals, pop_positive
from kalmix.types import belief_dtype


def lower(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Compute the gain of equation 17 of Memory by Design.

    It is reset / (r^2 + reset |k|^2) for a scalar reset variance, and the vector reset k / (r^2 + k' reset k) for a
    diagonal one.
    """
    layout = "B T G" if signals["reset"].ndim == 3 else "B T G K"
    reset, noise = pop_positive("reset", k, v, signals, layout), pop_positive("obs_noise", k, v, signals)
    key = k.to(belief_dtype(k.dtype)).repeat_interleave(v.shape[2] // k.shape[2], 2)
    if reset.ndim == 3:
        return signals | {"gain": 1 / (noise / reset + key.square().sum(-1))}
    return signals | {"gain": reset * key / (noise[..., None] + (reset * key.square()).sum(-1, keepdim=True))}
