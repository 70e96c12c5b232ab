"""Tile and block sizes of the Triton kernels of `ridge`. They are also needed where Triton is not installed."""

import torch
from torch import Tensor

from kalmix.ops._shared.token_blocks import tokens_per_tile


def tile_size(k: Tensor, rows: Tensor | None) -> int:
    """Return the tokens per tile for keys `[B, T, H, K]`: at most 64 in bfloat16 with keys wider than 32, else 32.

    Short sequences have smaller tiles: see `tokens_per_tile`.
    """
    sequences = None if rows is None else rows.shape[0]
    large = 64 if k.dtype == torch.bfloat16 and k.shape[3] > 32 else 32
    return tokens_per_tile(k.shape[0], k.shape[1], sequences, large)


def scan_columns(sequences: int, heads: int, padded: int) -> int:
    """Return the columns per program of a kernel that steps from tile to tile, for blocks of `padded` rows."""
    columns = min(padded, 64 if padded <= 128 else 32)
    while columns > 32 and sequences * heads * (padded // columns) < 128:
        columns //= 2
    return columns
