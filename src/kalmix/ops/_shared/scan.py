"""Scan over chunks: states passed through a series of maps that can be composed.

Maps are applied one after another. Under `torch.compile` they are composed in groups, so that the graph stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP_SIZE = 8  # maps that are composed to one under `torch.compile`

State = tuple[Tensor, ...]


class DecayAndWrite(NamedTuple):
    """Maps M -> decay * M + write, of a memory without corrections or of its gradient."""

    decay: Tensor  # [..., K or 1, 1]
    write: Tensor  # [..., K, V]

    def __call__(self, state: State) -> State:
        return (torch.addcmul(self.write, self.decay, state[0]),)

    def compose(self, after: DecayAndWrite) -> DecayAndWrite:
        """Return the map that applies this map and then `after`."""
        return DecayAndWrite(self.decay * after.decay, *after((self.write,)))


class MapsWithReset(NamedTuple):
    """Maps of chunks, some of which replace the incoming state by an initial state.

    A replaced state is selected away, never multiplied by 0, since it may be infinite or NaN.
    """

    maps: Any
    reset: Tensor | None = None  # bool, True for maps that replace the incoming state
    initial: State = ()

    def __call__(self, state: State) -> State:
        return self.maps(self.entry(state))

    def entry(self, state: State) -> State:
        """Return the states that maps are applied to: the incoming ones, or the initial ones after a reset."""
        if self.reset is None:
            return state
        return tuple(torch.where(self.reset, own, x) for own, x in zip(self.initial, state, strict=True))

    def compose(self, after: MapsWithReset) -> MapsWithReset:
        """Return the maps that apply these maps and then `after`."""
        maps = self.maps.compose(after.maps)
        if self.reset is None or after.reset is None:
            return MapsWithReset(maps)
        chosen = (torch.where(after.reset, own, x) for own, x in zip(after.maps, maps, strict=True))
        return MapsWithReset(type(maps)(*chosen), self.reset | after.reset, after.entry(self.initial))

    def apply(self, function: Callable[[Tensor], Tensor]) -> MapsWithReset:
        """Apply a function to every tensor."""
        maps = type(self.maps)(*(function(x) for x in self.maps))
        reset = None if self.reset is None else function(self.reset)
        return MapsWithReset(maps, reset, tuple(function(x) for x in self.initial))


def scan(maps: MapsWithReset, state: State, reverse: bool = False) -> State:
    """Return the states that each of P successive maps is applied to.

    Args:
        maps: `maps.maps` is a named tuple of tensors `[chains, P, ...]` with the methods `__call__` and `compose`. The
            map whose first tensor is 1 and whose other tensors are 0 must be the identity.
        state: initial state, tensors `[chains, ...]`.
        reverse: whether to apply the last map first.

    Returns:
        States `[chains, P, ...]`, in the order of the maps.

    Complexity: O(P) kernel launches; under `torch.compile`, the size of the graph is O(log P).
    """
    count = maps.maps[0].shape[1]
    if count <= GROUP_SIZE or not torch.compiler.is_compiling():
        incoming = _scan_one_by_one(maps, state, reverse)
    elif reverse:
        incoming = tuple(x[:, :count].flip(1) for x in _scan_by_groups(maps.apply(lambda x: x.flip(1)), state))
    else:
        incoming = tuple(x[:, :count] for x in _scan_by_groups(maps, state))
    return maps.entry(incoming)


def _scan_one_by_one(maps: MapsWithReset, state: State, reverse: bool = False) -> State:
    """Return the incoming state of each map, before any reset."""
    states, order = [state], range(maps.maps[0].shape[1])
    unbound = _unbind(maps)
    for i in order[:0:-1] if reverse else order[:-1]:
        states.append(unbound[i](states[-1]))
    return tuple(torch.stack(x[:: -1 if reverse else 1], 1) for x in zip(*states, strict=True))


def _unbind(maps: MapsWithReset) -> list[MapsWithReset]:
    """Return a list of the P maps."""
    kind, count = type(maps.maps), maps.maps[0].shape[1]
    columns = zip(*(x.unbind(1) for x in maps.maps), strict=True)
    if maps.reset is None:
        return [MapsWithReset(kind(*column)) for column in columns]
    initial = zip(*(x.unbind(1) for x in maps.initial), strict=True)
    assert maps.reset.shape[1] == count
    rows = zip(columns, maps.reset.unbind(1), initial, strict=True)
    return [MapsWithReset(kind(*x), reset, own) for x, reset, own in rows]


def _scan_by_groups(maps: MapsWithReset, state: State) -> State:
    """Compute `_scan_one_by_one` recursively: compose groups of maps, scan over the groups, then inside all groups.

    The number of maps is padded with identities, so that one graph serves every P up to `GROUP_SIZE` squared.
    """
    chains, groups = maps.maps[0].shape[0], -(-maps.maps[0].shape[1] // GROUP_SIZE)
    maps = _pad_with_identities(maps, groups * GROUP_SIZE)
    columns = [maps.apply(lambda x, i=i: x[:, i::GROUP_SIZE]) for i in range(GROUP_SIZE)]  # map i of every group
    composed = columns[0]
    for column in columns[1:]:
        composed = composed.compose(column)
    if groups <= GROUP_SIZE:
        starts = _scan_one_by_one(_pad_with_identities(composed, GROUP_SIZE), state)
    else:
        starts = _scan_by_groups(composed, state)
    grouped = maps.apply(lambda x: x.unflatten(1, (groups, GROUP_SIZE)).flatten(0, 1))
    states = _scan_one_by_one(grouped, tuple(x[:, :groups].flatten(0, 1) for x in starts))
    return tuple(x.unflatten(0, (chains, groups)).flatten(1, 2) for x in states)


def _pad_with_identities(maps: MapsWithReset, count: int) -> MapsWithReset:
    """Append identity maps until there are `count` maps."""
    missing = count - maps.maps[0].shape[1]

    def fill(x: Tensor, value: float = 0.0) -> Tensor:
        return pad(x, (0, 0) * (x.ndim - 2) + (0, missing), value=value)

    padded = type(maps.maps)(*(fill(x, float(i == 0)) for i, x in enumerate(maps.maps)))
    reset = None if maps.reset is None else fill(maps.reset)
    return MapsWithReset(padded, reset, tuple(fill(x) for x in maps.initial))
