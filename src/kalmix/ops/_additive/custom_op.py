"""The Triton row of `additive`: a memory that takes its values as they are."""

from __future__ import annotations

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._linear_memory.custom_op import filter_memory
from kalmix.segments import Segments
from kalmix.types import Filtered


def additive(signals: AdditiveSignals, belief: PointBelief, segments: Segments | None) -> Filtered:
    """See `kalmix.ops.additive`. Exact gradients; keeps a memory a tile of at most 64 tokens for them."""
    return filter_memory(signals, belief, segments, corrects=False)
