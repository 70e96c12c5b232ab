"""States carried from chunk to chunk by maps that compose: one after another or, for a compiler, in groups."""

from __future__ import annotations

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


def scan(maps: Any, state: State, backwards: bool = False) -> State:
    """The states before each of P maps, applied one after another: tensors `[lanes, ...]` become `[lanes, P, ...]`.

    Backwards, the last map is applied first.

    `maps` is a named tuple of tensors `[lanes, P, ...]` with `__call__` and `then`, and changes nothing where its
    first tensor is 1 and all else 0. O(P) launches; a compiler sees a graph that grows with the logarithm of P.
    """
    count = maps[0].shape[1]
    if count <= FAN or not torch.compiler.is_compiling():
        return _walk(maps, state, backwards)
    if backwards:
        return tuple(x.flip(1) for x in scan(type(maps)(*(x.flip(1) for x in maps)), state))
    return tuple(x[:, :count] for x in _climb(maps, state))


def _walk(maps: Any, state: State, backwards: bool = False) -> State:
    kind, states, turn = type(maps), [state], -1 if backwards else 1
    for column in list(zip(*(x.unbind(1) for x in maps), strict=True))[::turn][:-1]:
        states.append(kind(*column)(states[-1]))
    return tuple(torch.stack(parts[::turn], 1) for parts in zip(*states, strict=True))


def _climb(maps: Any, state: State) -> State:
    """As `_walk`, by groups, padded with maps that change nothing: one graph for any P up to the square of a group."""
    kind, lanes, groups = type(maps), maps[0].shape[0], -(-maps[0].shape[1] // FAN)
    maps = _filled(maps, groups * FAN)
    columns = [kind(*(x[:, i::FAN] for x in maps)) for i in range(FAN)]  # one map of every group
    whole = columns[0]
    for column in columns[1:]:
        whole = whole.then(column)
    starts = _walk(_filled(whole, FAN), state) if groups <= FAN else _climb(whole, state)
    grouped = kind(*(x.unflatten(1, (groups, FAN)).flatten(0, 1) for x in maps))
    states = _walk(grouped, tuple(x[:, :groups].flatten(0, 1) for x in starts))
    return tuple(x.unflatten(0, (lanes, groups)).flatten(1, 2) for x in states)


def _filled(maps: Any, count: int) -> Any:
    """`count` maps, the added ones changing nothing."""
    missing = count - maps[0].shape[1]
    return type(maps)(*(pad(x, (0, 0) * (x.ndim - 2) + (0, missing), value=float(i == 0)) for i, x in enumerate(maps)))
