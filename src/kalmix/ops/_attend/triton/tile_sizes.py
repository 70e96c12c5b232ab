"""Tokens of a tile, pipeline stages and warps of the kernels of `attend`, by row width, dtype and shared memory."""

from __future__ import annotations

from typing import Any

import torch

SMALL_TILE = {"M": 16, "N": 16, "STAGES": 1, "num_warps": 1}  # for sequences of few tokens
LARGE_TILE_MEMORY = 160 * 1024  # bytes of shared memory for the larger tiles; GeForce GPUs, L4 and L40S have 99 KiB


def forward_tiles(compiled: dict[str, Any], dtype: torch.dtype, shared_memory: int) -> dict[str, int]:
    """Return the tile of `attend_kernel`: the largest that fits registers and `shared_memory` bytes.

    In float32, 8 warps must not share a tile of 64 rows: Triton 3.6 then generates matrix products that read past the
    end of shared memory.
    """
    width, large = max(compiled["P"], compiled["W"]), shared_memory >= LARGE_TILE_MEMORY
    if compiled["BLOCK"] == 16:
        return SMALL_TILE
    if dtype == torch.float32:
        fits = large or width <= 64
        return {"M": 128 if fits else 64, "N": 32, "STAGES": 1, "num_warps": 8 if fits else 4}
    simple = large and _is_simple(compiled, width)
    rows = 128 if large or width <= 128 else 64
    return {"M": rows, "N": 64 if simple else 32, "STAGES": 4 if simple else 2, "num_warps": 8}


def query_grad_tiles(compiled: dict[str, Any], dtype: torch.dtype, shared_memory: int) -> dict[str, int]:
    """Return the tile of `query_grads_kernel`, under the same constraints as `forward_tiles`."""
    width, large = max(compiled["P"], compiled["W"]), shared_memory >= LARGE_TILE_MEMORY
    if compiled["BLOCK"] == 16:
        return SMALL_TILE
    if dtype == torch.float32:
        largest = shared_memory >= 192 * 1024
        rows = (128 if large else 64) if width <= 64 else (64 if largest else 32)
        return {"M": rows, "N": 32 if rows >= 64 else 16, "STAGES": 1, "num_warps": 8 if rows == 128 else 4}
    if not large and width > 128:
        return {"M": 32, "N": 32, "STAGES": 1, "num_warps": 4}
    simple = large and _is_simple(compiled, width)
    return {
        "M": 128 if width <= 128 else 64, "N": 64 if simple else 32, "STAGES": 3 if simple else 2, "num_warps": 8,
    }  # fmt: skip


def key_grad_tiles(compiled: dict[str, Any], dtype: torch.dtype, shared_memory: int) -> dict[str, int]:
    """Return the tile of `key_grads_kernel`, with few queries."""
    width, large = max(compiled["P"], compiled["W"]), shared_memory >= LARGE_TILE_MEMORY
    if compiled["BLOCK"] == 16:
        return SMALL_TILE
    if dtype == torch.float32:
        keys = (128 if width <= 64 else 64) if large else (64 if width <= 64 else 32)
        return {"M": 32, "N": keys, "STAGES": 1, "num_warps": 8 if keys == 128 else 4}
    if not large and width > 128:
        return {"M": 32, "N": 32, "STAGES": 1, "num_warps": 4}
    stages = 3 if large and width <= 128 else 2
    return {"M": 32, "N": 128 if width <= 128 else 64, "STAGES": stages, "num_warps": 8}


def _is_simple(compiled: dict[str, Any], width: int) -> bool:
    """Return whether a pair of tokens needs few registers."""
    return width <= 128 and compiled["SHARED"] and not compiled["VARIANCE"]
