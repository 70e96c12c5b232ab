"""The Triton row of `delta`: a memory that takes of its values what it did not know."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._linear_memory.custom_op import filter_memory
from kalmix.segments import Segments
from kalmix.types import Filtered


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    log_decay: Tensor | None,
    belief: PointBelief,
    segments: Segments | None,
) -> Filtered:
    """See `kalmix.ops.delta`. Exact gradients; keeps a memory a tile of at most 64 tokens for them, and the errors."""
    return filter_memory(q, k, v, gain, log_decay, belief, segments, corrects=True)
