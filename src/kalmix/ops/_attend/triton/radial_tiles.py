"""Tile sizes of the kernels of `attend_radial`, by row width, dtype and shared memory."""

from __future__ import annotations

from typing import Any

import torch

LARGE_TILE_MEMORY = 160 * 1024  # bytes of shared memory for the larger tiles; GeForce GPUs, L4 and L40S have 99 KiB


def forward_tiles(compiled: dict[str, Any], dtype: torch.dtype, shared_memory: int) -> dict[str, int]:
    """Return the tile of `attend_radial_kernel`."""
    large = shared_memory >= LARGE_TILE_MEMORY
    if dtype == torch.float32:
        return {"M": 64 if large else 32, "N": 32, "STAGES": 1, "num_warps": 4}
    rows = 128 if large and compiled["P"] > 64 else 64
    return {"M": rows, "N": 32, "STAGES": 2, "num_warps": 8 if rows == 128 else 4}


def backward_tiles() -> dict[str, int]:
    """Return the tile of both kernels over pairs of the backward pass.

    Larger ones spill registers. In float32, 8 warps must not share a tile of 64 rows: Triton 3.6 then generates
    illegal memory accesses.
    """
    return {"M": 32, "N": 32, "STAGES": 1, "num_warps": 4}
