"""Beliefs: what a filter knows, one type per algebra, mean first, leading axis sequences.

A belief is a `NamedTuple`, so it is immutable, a pytree wherever torch looks for one, and crosses
`torch.compile` unharmed. The three verbs below are all a cache or a beam search needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch import Tensor

_B = TypeVar("_B", bound=tuple)


def _take(belief: _B, index: Tensor) -> _B:
    """The sequences `index` (int64 `[M]`) of a belief, in that order: reordering, repeating, dropping."""
    return type(belief)(*(leaf.index_select(0, index) for leaf in belief))


def _to(belief: _B, *args: Any, **kwargs: Any) -> _B:
    """As `Tensor.to`, for every tensor of a belief."""
    return type(belief)(*(leaf.to(*args, **kwargs) for leaf in belief))


def _detach(belief: _B) -> _B:
    """The same belief, cut from the graph (truncated backpropagation through time)."""
    return type(belief)(*(leaf.detach() for leaf in belief))


class PointBelief(NamedTuple):
    """A memory without doubt: `mean` `[N, G, K, V]`."""

    mean: Tensor

    take = _take
    to = _to
    detach = _detach


class DiagonalBelief(NamedTuple):
    """Independent Gaussians, one a cell: `mean` and `variance`, both `[N, G, K, V]`."""

    mean: Tensor
    variance: Tensor

    take = _take
    to = _to
    detach = _detach


class DenseBelief(NamedTuple):
    """Gaussian columns that share a covariance: `mean` `[N, G, K, V]`, `covariance` `[N, G, K, K]`, symmetric."""

    mean: Tensor
    covariance: Tensor

    take = _take
    to = _to
    detach = _detach


class RidgeBelief(NamedTuple):
    """Weighted sums over the past: `cross` `[N, G, K, V]` of keys and values, `gram` `[N, G, K, K]` of keys alone."""

    cross: Tensor
    gram: Tensor

    take = _take
    to = _to
    detach = _detach
