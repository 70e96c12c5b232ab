"""Tokens of a tile, pipeline stages and warps of the kernels of `attend`, by row width and dtype."""

from __future__ import annotations

from typing import Any

import torch

SMALL_TILE = {"M": 16, "N": 16, "STAGES": 1, "num_warps": 1}  # for sequences of few tokens


def forward_tiles(compiled: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """Queries and keys of a tile, by what of the widest rows registers and shared memory hold.

    In float32 never 64 rows for 8 warps, two groups of which would share them: Triton 3.6 then has products read past
    the end of shared memory.
    """
    width = max(compiled["P"], compiled["W"])
    if compiled["BLOCK"] == 16:
        return SMALL_TILE
    if dtype == torch.float32:
        return {"M": 128, "N": 32, "STAGES": 1, "num_warps": 8}
    simple = width <= 128 and compiled["SHARED"] and not compiled["VARIANCE"]
    return {"M": 128, "N": 64 if simple else 32, "STAGES": 4 if simple else 2, "num_warps": 8}


def query_grad_tiles(compiled: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """A tile of `to_queries`: see `triton.tiles_ahead`."""
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
    """A tile of `to_keys`, few queries."""
    width = max(compiled["P"], compiled["W"])
    if compiled["BLOCK"] == 16:
        return SMALL_TILE
    if dtype == torch.float32:
        return {"M": 32, "N": 128 if width <= 64 else 64, "STAGES": 1, "num_warps": 8 if width <= 64 else 4}
    return {"M": 32, "N": 128 if width <= 128 else 64, "STAGES": 3 if width <= 128 else 2, "num_warps": 8}
