"""Block sizes of the Triton kernels of `attend`, and the number of values they precompute per token."""

import torch

from kalmix.ops._shared.token_blocks import tokens_per_block

MAX_SLICE_WIDTH = {torch.bfloat16: 256, torch.float32: 128}


def block_size(slots: int) -> int:
    """Return the number of tokens of a block, a multiple of every tile size."""
    return tokens_per_block(slots, 128)


def split_value_width(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return into how many column slices values are split, one per GPU program, and the width of a slice."""
    slices = -(-width // MAX_SLICE_WIDTH[dtype])
    return slices, -(-width // slices)


def num_token_features(shared_dynamics: bool) -> int:
    """Return the number of precomputed values per token: norm, lag, and four functions of the lag for each dynamics."""
    return 6 if shared_dynamics else 10
