"""Memory that is filled with NaN when it is allocated, so that tests find outputs that a kernel did not write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MEMORY: Any = torch.utils.deterministic


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Fill memory that `torch.empty` and similar functions allocate with NaN (integers: the largest number)."""
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
