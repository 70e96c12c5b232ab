"""The shape of every answer."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Belief(Protocol):
    """What is known after some tokens: an immutable pytree of tensors whose leading axis is sequences."""

    def take(self, index: Tensor) -> Self: ...
    def to(self, *args: Any, **kwargs: Any) -> Self: ...
    def detach(self) -> Self: ...


class Filtered(NamedTuple):
    """What every op returns.

    Attributes:
        mean: `[B, T, G, V]`, the posterior mean of the read-out, in the dtype of the values.
        variance: `[B, T, G, V]`, or `[B, T, G, 1]` where one value serves all columns; `None` unless asked for.
            It is in the dtype of the belief: half precision would round small variances to nothing.
        belief: the belief after the last token; pass it on to continue.
    """

    mean: Tensor
    variance: Tensor | None
    belief: Any  # a Belief; named Any because type checkers cannot narrow a protocol inside a NamedTuple


torch.serialization.add_safe_globals([Filtered])  # a saved one loads where only data may be


def belief_dtype(dtype: torch.dtype) -> torch.dtype:
    """Beliefs are float32 whatever the inputs are, and float64 where the inputs are."""
    return torch.float64 if dtype == torch.float64 else torch.float32
