"""Triton kernel of `additive`."""

from __future__ import annotations

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._linear_memory.custom_op import filter_memory
from kalmix.segments import Segments
from kalmix.types import Filtered


def additive(
    signals: AdditiveSignals, belief: PointBelief, segments: Segments | None, no_prior: bool = False
) -> Filtered:
    """Compute `kalmix.ops.additive` in Triton. Training stores a memory per tile of at most 64 tokens.

    See `filter_memory` for the arguments.
    """
    return filter_memory(signals, belief, segments, corrects=False, no_prior=no_prior)
