"""How the Triton kernels of `attend` cut time and values, and what they keep of a token."""

import torch

WIDEST = {torch.bfloat16: 256, torch.float32: 128}


def block_size(slots: int) -> int:
    """Tokens of a block, of which tiles are parts."""
    return 16 if slots <= 64 else 128


def strips_of(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Into how many strips, and how wide ones, values are cut for one program to take one."""
    strips = -(-width // WIDEST[dtype])
    return strips, -(-width // strips)


def traits_of(shared: bool) -> int:
    """Numbers a token: its size, a lag and four more of that; where values have their own dynamics, four of theirs."""
    return 6 if shared else 10
