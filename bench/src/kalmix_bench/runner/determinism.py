"""Deterministic sums, so that a seed gives the same numbers again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic_mode(device: torch.device) -> Iterator[None]:
    """Sums are in one order, so that a seed gives the same numbers again, whatever runs beside it.

    On a CPU a cell takes one core. On a GPU it takes PyTorch's deterministic algorithms; of an operation that has none,
    PyTorch warns.
    """
    memory: Any = torch.utils.deterministic
    threads, blank = torch.get_num_threads(), memory.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # nothing is read before it is written
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = blank
