"""The Triton row of `additive`: a memory that takes its values as they are."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._linear_memory.custom_op import filter_memory
from kalmix.segments import Segments
from kalmix.types import Filtered


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    belief: PointBelief,
    segments: Segments | None,
) -> Filtered:
    """See `kalmix.ops.additive`. Exact gradients; keeps a memory a tile of at most 64 tokens for them."""
    return filter_memory(q, k, v, gain, log_decay, belief, segments, corrects=False)
