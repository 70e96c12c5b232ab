"""Triton kernel of `delta`."""

from __future__ import annotations

from kalmix.beliefs import PointBelief
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._linear_memory.custom_op import filter_memory
from kalmix.segments import Segments
from kalmix.types import Filtered


def delta(signals: DeltaSignals, belief: PointBelief, segments: Segments | None, no_prior: bool = False) -> Filtered:
    """Compute `kalmix.ops.delta` in Triton. Training stores errors, and a memory per up to 64 tokens.

    See `filter_memory` for the arguments.
    """
    return filter_memory(signals, belief, segments, corrects=True, no_prior=no_prior)
