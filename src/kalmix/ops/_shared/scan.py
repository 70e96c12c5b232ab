"""States carried from chunk to chunk by maps that compose: one after another or, for a compiler, in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

FAN = 8  # maps of a group, where the graph must not grow with their number

State = tuple[Tensor, ...]


class Writes(NamedTuple):
    """What chunks do to a memory that only adds, or to its adjoint: it decays and something is written."""

    path: Tensor  # [..., K or 1, 1]
    write: Tensor  # [..., K, V]

    def __call__(self, state: State) -> State:
        return (torch.addcmul(self.write, self.path, state[0]),)

    def then(self, after: Writes) -> Writes:
        return Writes(self.path * after.path, *after((self.write,)))


class Links(NamedTuple):
    """Maps of chunks, some of which replace the state that arrives by one of their own.

    The state that arrives there is never multiplied, not even by 0: it may be infinite or NaN.
    """

    maps: Any
    anew: Tensor | None = None  # bool, which maps do so
    fresh: State = ()

    def __call__(self, state: State) -> State:
        return self.maps(self.arriving(state))

    def arriving(self, state: State) -> State:
        """Return the states that maps are applied to."""
        if self.anew is None:
            return state
        return tuple(torch.where(self.anew, own, x) for own, x in zip(self.fresh, state, strict=True))

    def then(self, after: Links) -> Links:
        maps = self.maps.then(after.maps)
        if self.anew is None or after.anew is None:
            return Links(maps)
        chosen = (torch.where(after.anew, own, x) for own, x in zip(after.maps, maps, strict=True))
        return Links(type(maps)(*chosen), self.anew | after.anew, after.arriving(self.fresh))

    def each(self, function: Callable[[Tensor], Tensor]) -> Links:
        """Apply a function to every tensor."""
        maps = type(self.maps)(*(function(x) for x in self.maps))
        return Links(maps, None if self.anew is None else function(self.anew), tuple(function(x) for x in self.fresh))


def scan(links: Links, state: State, backwards: bool = False) -> State:
    """Return the states before each of P maps, applied one after another: `[lanes, ...]` become `[lanes, P, ...]`.

    Backwards, the last map is applied first.

    `links.maps` is a named tuple of tensors `[lanes, P, ...]` with `__call__` and `then`, and changes nothing where its
    first tensor is 1 and all else 0. O(P) launches; a compiler sees a graph that grows with the logarithm of P.
    """
    count = links.maps[0].shape[1]
    if count <= FAN or not torch.compiler.is_compiling():
        before = _walk(links, state, backwards)
    elif backwards:
        before = tuple(x[:, :count].flip(1) for x in _climb(links.each(lambda x: x.flip(1)), state))
    else:
        before = tuple(x[:, :count] for x in _climb(links, state))
    return links.arriving(before)


def _walk(links: Links, state: State, backwards: bool = False) -> State:
    """Return the states that come to each map, before any is replaced."""
    states, order = [state], range(links.maps[0].shape[1])
    columns = _columns(links)
    for i in order[:0:-1] if backwards else order[:-1]:
        states.append(columns[i](states[-1]))
    return tuple(torch.stack(parts[:: -1 if backwards else 1], 1) for parts in zip(*states, strict=True))


def _columns(links: Links) -> list[Links]:
    """Return every map for itself."""
    kind, count = type(links.maps), links.maps[0].shape[1]
    maps = zip(*(x.unbind(1) for x in links.maps), strict=True)
    if links.anew is None:
        return [Links(kind(*column)) for column in maps]
    fresh = zip(*(x.unbind(1) for x in links.fresh), strict=True)
    assert links.anew.shape[1] == count
    return [Links(kind(*x), anew, own) for x, anew, own in zip(maps, links.anew.unbind(1), fresh, strict=True)]


def _climb(links: Links, state: State) -> State:
    """As `_walk`, by groups, padded with maps that change nothing: one graph for any P up to the square of a group."""
    lanes, groups = links.maps[0].shape[0], -(-links.maps[0].shape[1] // FAN)
    links = _filled(links, groups * FAN)
    columns = [links.each(lambda x, i=i: x[:, i::FAN]) for i in range(FAN)]  # one map of every group
    whole = columns[0]
    for column in columns[1:]:
        whole = whole.then(column)
    starts = _walk(_filled(whole, FAN), state) if groups <= FAN else _climb(whole, state)
    grouped = links.each(lambda x: x.unflatten(1, (groups, FAN)).flatten(0, 1))
    states = _walk(grouped, tuple(x[:, :groups].flatten(0, 1) for x in starts))
    return tuple(x.unflatten(0, (lanes, groups)).flatten(1, 2) for x in states)


def _filled(links: Links, count: int) -> Links:
    """`count` maps, the added ones changing nothing."""
    missing = count - links.maps[0].shape[1]

    def fill(x: Tensor, value: float = 0.0) -> Tensor:
        return pad(x, (0, 0) * (x.ndim - 2) + (0, missing), value=value)

    maps = type(links.maps)(*(fill(x, float(i == 0)) for i, x in enumerate(links.maps)))
    return Links(maps, None if links.anew is None else fill(links.anew), tuple(fill(x) for x in links.fresh))
