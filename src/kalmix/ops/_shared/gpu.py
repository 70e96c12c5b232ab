"""Properties of GPUs that the choice of kernels and of their launch options depends on."""

from __future__ import annotations

from functools import cache

import torch

HOPPER_SHARED_MEMORY = 232_448  # bytes; on the CPU, rules choose the tiles of an H100, so that tests use these
HOPPER_MULTIPROCESSORS = 132
BLACKWELL = 10  # compute capability of B200 and GB200; GeForce GPUs of that generation have 12


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


def gpu_shared_memory(index: int | None) -> int:
    """Return `shared_memory` of GPU `index` (the current one if `None`); that of an H100 without a GPU."""
    if not torch.cuda.is_available():
        return HOPPER_SHARED_MEMORY
    return _shared_memory(torch.cuda.current_device() if index is None else index)


def unsupported_blackwell(index: int | None) -> str | None:
    """Return why Triton cannot compile large products for GPU `index` (the current one if `None`), or `None`."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    if major == BLACKWELL and torch.version.cuda is not None:
        return f"Triton 3.6 does not compile it for GPUs of compute capability {major}.{minor} (Blackwell)"
    return None


# Equivalent to `torch.compiler.assume_constant_result`, which imports the compiler and takes two seconds.
gpu_shared_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]
unsupported_blackwell._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _shared_memory(device: torch.device | int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
