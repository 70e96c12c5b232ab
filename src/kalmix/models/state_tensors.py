"""States of mixers as plain lists of tensors, and back.

The exporters of transformers copy caches, and they rebuild tuples in a way that fails for named tuples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TIMES = ("time", "times")  # fields of states that are float64 with any model
Structure = Any  # "tensor", or a class of named tuples and the structures of its fields


def flatten(state: Any) -> tuple[list[Tensor], Structure]:
    """Return all tensors of a state, a tensor or a named tuple of states, and its structure for `rebuild`."""
    if isinstance(state, Tensor):
        return [state], "tensor"
    parts = [flatten(x) for x in state]
    return [tensor for tensors, _ in parts for tensor in tensors], (type(state), [structure for _, structure in parts])


def rebuild(tensors: list[Tensor], structure: Structure) -> Any:
    """Return the state with these tensors; inverse of `flatten`."""
    return _rebuild(tensors, structure, 0)[0]


def _rebuild(tensors: list[Tensor], structure: Structure, start: int) -> tuple[Any, int]:
    """Return the state whose tensors begin at `start`, and the index after its last tensor."""
    if structure == "tensor":
        return tensors[start], start + 1
    kind, structures = structure
    parts = []
    for part in structures:
        state, start = _rebuild(tensors, part, start)
        parts.append(state)
    return kind(*parts), start


def with_exact_times(tensors: list[Tensor], structure: Structure) -> list[Tensor]:
    """Return the tensors of a state, with times in float64; the exporters of transformers cast all to one dtype."""
    exact = _are_times(structure, False)
    if all(x.dtype == torch.float64 for x, is_time in zip(tensors, exact, strict=True) if is_time):
        return tensors
    return [x.double() if is_time else x for x, is_time in zip(tensors, exact, strict=True)]


def _are_times(structure: Structure, is_time: bool) -> list[bool]:
    if structure == "tensor":
        return [is_time]
    kind, structures = structure
    return [x for name, part in zip(kind._fields, structures, strict=True) for x in _are_times(part, name in TIMES)]
