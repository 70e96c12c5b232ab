"""The Triton row of `delta`: a memory that takes of its values what it did not know."""

from __future__ import annotations

from kalmix.beliefs import PointBelief
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._linear_memory.custom_op import filter_memory
from kalmix.segments import Segments
from kalmix.types import Filtered


def delta(signals: DeltaSignals, belief: PointBelief, segments: Segments | None) -> Filtered:
    """See `kalmix.ops.delta`. Exact gradients; keeps a memory a tile of at most 64 tokens for them, and the errors."""
    return filter_memory(signals, belief, segments, corrects=True)
