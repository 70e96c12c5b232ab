"""How the Triton kernels of `ridge` cut time, and what they keep of H."""

import torch


def tile_size(length: int, width: int, dtype: torch.dtype) -> int:
    """Tokens a tile: 64 for tensor cores, of which narrow keys leave most idle; half as many in float32."""
    if length <= 64:
        return 16
    return 64 if dtype == torch.bfloat16 and width > 32 else 32


def in_two_parts(width: int, dtype: torch.dtype) -> bool:
    """Whether H is kept rounded and what is left of it: shared memory holds no second part of wide ones."""
    return dtype == torch.bfloat16 and width <= 128
