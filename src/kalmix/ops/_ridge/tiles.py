"""Tile size of the Triton kernels of `ridge`. It is also needed where Triton is not installed."""

import torch

from kalmix.ops._shared.token_blocks import tokens_per_block


def tile_size(length: int, width: int, dtype: torch.dtype) -> int:
    """Return the number of tokens per tile: 64 in bfloat16 with keys wider than 32, else 32; 16 for up to 64 tokens."""
    return tokens_per_block(length, 64 if dtype == torch.bfloat16 and width > 32 else 32)
