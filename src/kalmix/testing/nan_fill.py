"""Poison: allocations that nobody has written hold NaN, so that an unwritten output shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MEMORY: Any = torch.utils.deterministic


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its kin allocate with NaN (the largest number, for integers)."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _MEMORY.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    _MEMORY.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _MEMORY.fill_uninitialized_memory = before[2]
