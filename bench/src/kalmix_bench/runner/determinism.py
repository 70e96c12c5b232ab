"""Deterministic execution of a cell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic_mode(device: torch.device, *, tf32: bool = False) -> Iterator[None]:
    """Make results reproducible from a seed inside this context.

    On a CPU, PyTorch uses one thread. On a GPU, PyTorch's deterministic algorithms are on; it warns about operations
    that have none.

    Args:
        device: device that computes.
        tf32: whether a GPU rounds float32 operands of matrix products to TF32. CPUs are not affected.
    """
    memory: Any = torch.utils.deterministic
    threads, blank = torch.get_num_threads(), memory.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # not needed: no cell reads uninitialized memory
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = blank
        torch.set_float32_matmul_precision(precision)
