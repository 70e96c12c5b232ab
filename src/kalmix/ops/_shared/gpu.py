"""Properties of GPUs that the choice of kernels and of their launch options depends on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

HOPPER_SHARED_MEMORY = 232_448  # bytes; on the CPU, rules choose the tiles of an H100, so that tests use these
HOPPER_MULTIPROCESSORS = 132
BLACKWELL = 10  # compute capability of B200 and GB200; GeForce GPUs of that generation have 12


def constant_in_graphs(function: Callable[[int | None], Any]) -> Callable[[int | None], Any]:
    """Mark a function of a GPU's index, so that `torch.compile` calls it while tracing and stores the result.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler, which takes two seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@cache
def shared_memory(device: torch.device) -> int:
    """Return the number of bytes of shared memory that one program may use."""
    return HOPPER_SHARED_MEMORY if device.type == "cpu" else _shared_memory(device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    if device.type == "cpu":
        return HOPPER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@constant_in_graphs
def gpu_shared_memory(index: int | None) -> int:
    """Return `shared_memory` of GPU `index` (the current one if `None`); that of an H100 without a GPU."""
    if not torch.cuda.is_available():
        return HOPPER_SHARED_MEMORY
    return _shared_memory(torch.cuda.current_device() if index is None else index)


@constant_in_graphs
def unsupported_blackwell(index: int | None) -> str | None:
    """Return why Triton cannot compile large products for GPU `index` (the current one if `None`), or `None`."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    if major == BLACKWELL and torch.version.cuda is not None:
        return f"Triton 3.6 does not compile it for GPUs of compute capability {major}.{minor} (Blackwell)"
    return None


def _shared_memory(device: torch.device | int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
