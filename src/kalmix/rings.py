"""Rings: histories of fixed size, in which the token at position p of its sequence is at index p modulo the size.

A history is a named tuple of tensors `[N, S, ...]` with a field `positions`, int64 `[N, S]`, which is -1 in empty
slots: `HistoryBelief`, `AttentionState`. A state is a tensor, a history, or a named tuple of states. The functions
change the histories of a state, and return its other tensors as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def find_history(state: Any) -> Any:
    """Return the first history of a state, or `None`. All histories of a layer's state have the same positions."""
    if isinstance(state, Tensor) or hasattr(state, "positions"):
        return None if isinstance(state, Tensor) else state
    return next((x for x in map(find_history, state) if x is not None), None)


def empty_history(history: Any, size: int) -> Any:
    """Return a history like another one, with `size` empty slots."""
    empty = type(history)(*(x.new_zeros(x.shape[0], size, *x.shape[2:]) for x in history))
    empty.positions.fill_(-1)
    return empty


def as_rings(state: Any, size: int) -> Any:
    """Return a state whose histories are rings of the newest `size` tokens."""

    def ring(history: Any) -> Any:
        positions = history.positions
        rings = empty_history(history, size + 1)  # the last index is for tokens that are dropped
        if positions.shape[1]:
            kept = (positions >= 0) & (positions > positions.amax(1, keepdim=True) - size)
            index = torch.where(kept, positions % size, size)
            row = torch.arange(index.shape[0], device=index.device)[:, None]
            for buffer, x in zip(rings, history, strict=True):
                buffer[row, index] = x
        return type(history)(*(x[:, :size] for x in rings))

    return _map_histories(ring, state)


def as_rings_like(state: Any, pool: Any) -> Any:
    """Return a state whose histories are rings of the size of those in `pool`, a state with the same fields."""
    history = find_history(pool)
    return state if history is None else as_rings(state, history.positions.shape[1])


def in_order(state: Any) -> Any:
    """Return a state whose histories have their tokens in order, after empty slots."""

    def sort(history: Any) -> Any:
        row = torch.arange(history.positions.shape[0], device=history.positions.device)[:, None]
        order = history.positions.argsort(1)
        return type(history)(*(x[row, order] for x in history))

    return _map_histories(sort, state)


def _map_histories(function: Callable[[Any], Any], state: Any) -> Any:
    if isinstance(state, Tensor):
        return state
    if hasattr(state, "positions"):
        return function(state)
    return type(state)(*(_map_histories(function, x) for x in state))
