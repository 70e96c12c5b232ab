"""How the Triton kernels of `attend` cut time and values, and what they keep of a token."""

import torch

MAX_SLICE_WIDTH = {torch.bfloat16: 256, torch.float32: 128}


def block_size(slots: int) -> int:
    """Tokens of a block, of which tiles are parts."""
    return 16 if slots <= 64 else 128


def split_value_width(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Into how many strips, and how wide ones, values are cut for one program to take one."""
    slices = -(-width // MAX_SLICE_WIDTH[dtype])
    return slices, -(-width // slices)


def num_token_features(shared_dynamics: bool) -> int:
    """Numbers a token: its size, a lag and four more of that; where values have their own dynamics, four of theirs."""
    return 6 if shared_dynamics else 10
