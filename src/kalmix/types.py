"""Types shared by ops and layers: `Belief`, `Filtered`, and the dtype of beliefs."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Belief(Protocol):
    """Protocol of beliefs and layer states: an immutable pytree of tensors whose first axis is sequences.

    Pass it to the next call to continue a sequence. See `kalmix.beliefs` for its methods.

    Example:
        >>> from kalmix import Belief, PointBelief
        >>> belief = PointBelief(torch.zeros(3, 1, 4, 8))  # 3 sequences
        >>> isinstance(belief, Belief), belief.take(torch.tensor([0, 0])).mean.shape
        (True, torch.Size([2, 1, 4, 8]))
    """

    def take(self, index: Tensor) -> Self: ...
    def to(self, *args: Any, **kwargs: Any) -> Self: ...
    def detach(self) -> Self: ...


class Filtered(NamedTuple):
    """Output of every op, of `kalmix.filter`, `kalmix.oracle` and of a layer's `filter` method.

    A read-out is the memory applied to a query: M'q for a memory matrix M. The shapes below are those of ops. For
    `layer.filter(x)`, mean and variance are those of the output, `[B, T, D]`, and `belief` is the state of the layer;
    calling the layer, `layer(x)`, returns only the pair of mean and state.

    Attributes:
        mean: `[B, T, G, V]`, posterior mean of the read-out at each token, in the dtype of the values (float64
            from `kalmix.oracle`); 0 at tokens outside every segment.
        variance: posterior variance of the read-out, without observation noise: `[B, T, G, V]`, or `[B, T, G, 1]` if
            all columns share it; 0 at tokens outside every segment. `None` unless the call had `variance=True`. It has
            the dtype of the belief.
        belief: belief after the last token of each sequence, in float32 (float64 if the inputs are float64, and
            always from `kalmix.oracle`). Pass it to the next call of the same function to continue the sequences.

    Example:
        >>> from kalmix import ops
        >>> x = torch.randn(2, 16, 1, 4)
        >>> mean, variance, belief = ops.additive(x, x, x)
        >>> mean.shape, variance, belief.mean.shape
        (torch.Size([2, 16, 1, 4]), None, torch.Size([2, 1, 4, 4]))
    """

    mean: Tensor
    variance: Tensor | None
    belief: Any  # a Belief: type checkers cannot narrow a protocol inside a NamedTuple


torch.serialization.add_safe_globals([Filtered])  # for `torch.load(weights_only=True)`


def belief_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of beliefs for inputs of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
