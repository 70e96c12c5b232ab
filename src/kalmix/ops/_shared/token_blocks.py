"""Number of tokens in a block, a rule that `torch.compile` can trace without a guard on the length."""

from __future__ import annotations

import torch

MAX_SHORT = 64  # longest sequence that is divided into small blocks
SMALL = 16


def tokens_per_block(length: int, large: int) -> int:
    """Return the number of tokens per block: 16 for up to 64 tokens, else `large`.

    Fake kernels call this with a symbolic length. A branch would be a guard, and each side of it another graph. The
    result is therefore an expression of the length, and so is the number of blocks in the shape of a stored tensor.
    Such a tensor must have no axis that has size 1 for some lengths only, for PyTorch would add a guard for it: store
    the tensors of blocks with all axes flattened.
    """
    if isinstance(length, int):
        return SMALL if length <= MAX_SHORT else large
    return SMALL + (large - SMALL) * torch.sym_min(1, torch.sym_max(0, length - MAX_SHORT))


def num_blocks(length: int, size: int) -> int:
    """Return the number of blocks of `size` tokens, the last of which may be shorter.

    In this form PyTorch can prove that it is positive, without which it adds guards and `torch.export` fails.
    """
    return 1 + (length - 1) // size
