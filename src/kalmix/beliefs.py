"""Beliefs: what a filter knows, one type per algebra, mean first, leading axis sequences.

A belief is a `NamedTuple`, so it is immutable, a pytree wherever torch looks for one, and crosses
`torch.compile` unharmed. `torch.load(weights_only=True)` loads a saved one. The three verbs below are all a cache
or a beam search needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
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


def loadable(kind: type[_B]) -> type[_B]:
    """Let `torch.load(weights_only=True)`, its default, load saved instances of a class of tensors; a decorator."""
    torch.serialization.add_safe_globals([kind])
    return kind


@loadable
class PointBelief(NamedTuple):
    """A memory without doubt: `mean` `[N, G, K, V]`."""

    mean: Tensor

    take = _take
    to = _to
    detach = _detach


@loadable
class DiagonalBelief(NamedTuple):
    """Independent Gaussians, one a cell: `mean` and `variance`, both `[N, G, K, V]`."""

    mean: Tensor
    variance: Tensor

    take = _take
    to = _to
    detach = _detach


@loadable
class DenseBelief(NamedTuple):
    """Gaussian columns that share a covariance: `mean` `[N, G, K, V]`, `covariance` `[N, G, K, K]`, symmetric."""

    mean: Tensor
    covariance: Tensor

    take = _take
    to = _to
    detach = _detach


@loadable
class RidgeBelief(NamedTuple):
    """Weighted sums over the past: `cross` `[N, G, K, V]` of keys and values, `gram` `[N, G, K, K]` of keys alone."""

    cross: Tensor
    gram: Tensor

    take = _take
    to = _to
    detach = _detach


@loadable
class HistoryBelief(NamedTuple):
    """All that was seen, or what a window still shows of it, in S slots that may be empty.

    Attributes:
        keys: `[N, S, H, K]`, as they were given.
        values: `[N, S, G, V]`, as they were given.
        times: float64 `[N, S]`, so that a clock's seconds lose nothing.
        positions: int64 `[N, S]`, which token of its sequence a slot holds, counted from 0; -1 where it holds none,
            and then nothing is to be made of its key, value and time. They grow from slot to slot.

    Sequences packed into one row share its slots, uncopied, each with its own positions.
    """

    keys: Tensor
    values: Tensor
    times: Tensor
    positions: Tensor

    take = _take
    detach = _detach

    def to(self, *args: Any, **kwargs: Any) -> HistoryBelief:
        """As `Tensor.to`; times and positions keep their dtypes."""
        keys, values = (x.to(*args, **kwargs) for x in self[:2])
        return HistoryBelief(keys, values, self.times.to(keys.device), self.positions.to(keys.device))

    @property
    def lengths(self) -> Tensor:
        """How many tokens each sequence holds, `[N]`."""
        return (self.positions >= 0).sum(1)

    def newest(self, count: int) -> HistoryBelief:
        """The last `count` tokens of every sequence, or all, side by side in the last slots."""
        empty_first = self.positions.argsort(dim=1, stable=True)
        slots = empty_first[:, max(0, self.positions.shape[1] - count) :]
        row = torch.arange(slots.shape[0], device=slots.device)[:, None]
        return HistoryBelief(*(leaf[row, slots] for leaf in self))

    def compact(self) -> HistoryBelief:
        """As many slots as the longest sequence holds tokens, 0 in empty ones; looks at values: a GPU is waited for."""
        keys, values, times, positions = self.newest(int(self.lengths.max()) if self.positions.numel() else 0)
        held = positions >= 0
        keys, values = (torch.where(held[..., None, None], x, 0) for x in (keys, values))
        return HistoryBelief(keys, values, torch.where(held, times, 0), positions)
