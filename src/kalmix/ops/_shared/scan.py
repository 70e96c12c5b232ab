"""Scan over chunks: states passed through a series of maps, one after another."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, ...]


class DecayAndWrite(NamedTuple):
    """Maps M -> decay * M + write, of a memory without corrections or of its gradient."""

    decay: Tensor  # [..., K or 1, 1]
    write: Tensor  # [..., K, V]

    def __call__(self, state: State) -> State:
        return (torch.addcmul(self.write, self.decay, state[0]),)


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


def scan(maps: MapsWithReset, state: State, reverse: bool = False) -> State:
    """Return the states that each of P successive maps is applied to.

    Args:
        maps: `maps.maps` is a named tuple of tensors `[chains, P, ...]` with the method `__call__`.
        state: initial state, tensors `[chains, ...]`.
        reverse: whether to apply the last map first.

    Returns:
        States `[chains, P, ...]`, in the order of the maps.

    Complexity: O(P) kernel launches.
    """
    states, order = [state], range(maps.maps[0].shape[1])
    unbound = _unbind(maps)
    for i in order[:0:-1] if reverse else order[:-1]:
        states.append(unbound[i](states[-1]))
    return maps.entry(tuple(torch.stack(x[:: -1 if reverse else 1], 1) for x in zip(*states, strict=True)))


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
