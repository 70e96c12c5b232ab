"""Tokens of a tile, pipeline stages and warps of the kernels of `attend`, by row width and dtype."""

from __future__ import annotations

from typing import Any

import torch

SMALL_TILE = {"M": 16, "N": 16, "STAGES": 1, "num_warps": 1}  # for sequences of few tokens


def forward_tiles(compiled: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of `attend_kernel`: the largest that fits registers and shared memory.

    In float32, 8 warps must not share a tile of 64 rows: Triton 3.6 then generates matrix products that read past the
    end of shared memory.
    """
    width = max(compiled["P"], compiled["W"])
    if compiled["BLOCK"] == 16:
        return SMALL_TILE
    if dtype == torch.float32:
        return {"M": 128, "N": 32, "STAGES": 1, "num_warps": 8}
    simple = width <= 128 and compiled["SHARED"] and not compiled["VARIANCE"]
    return {"M": 128, "N": 64 if simple else 32, "STAGES": 4 if simple else 2, "num_warps": 8}


def query_grad_tiles(compiled: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of `query_grads_kernel`, under the same constraints as `forward_tiles`."""
    width = max(compiled["P"], compiled["W"])
    if compiled["BLOCK"] == 16:
        return SMALL_TILE
    if dtype == torch.float32:
        return {"M": 128 if width <= 64 else 64, "N": 32, "STAGES": 1, "num_warps": 8 if width <= 64 else 4}
    simple = width <= 128 and compiled["SHARED"] and not compiled["VARIANCE"]
    return {
        "M": 128 if width <= 128 else 64, "N": 64 if simple else 32, "STAGES": 3 if simple else 2, "num_warps": 8,
    }  # fmt: skip


def key_grad_tiles(compiled: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of `key_grads_kernel`, with few queries."""
    width = max(compiled["P"], compiled["W"])
    if compiled["BLOCK"] == 16:
        return SMALL_TILE
    if dtype == torch.float32:
        return {"M": 32, "N": 128 if width <= 64 else 64, "STAGES": 1, "num_warps": 8 if width <= 64 else 4}
    return {"M": 32, "N": 128 if width <= 128 else 64, "STAGES": 3 if width <= 128 else 2, "num_warps": 8}
