"""Numbers of tokens in blocks and tiles, rules that `torch.compile` can trace without guards on lengths."""

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


def tokens_per_tile(batch: int, length: int, sequences: int | None, large: int) -> int:
    """Return the number of tokens per tile, for sequences with a mean of `batch * length / sequences` tokens.

    It is 16 below a mean of 32 tokens, 32 below 64, and never more than that of `tokens_per_block`. So the tiles of all
    sequences together have room for at most twice the tokens, and for 16 more tokens per sequence. Lengths are not
    read, because this would synchronise with the GPU.

    Args:
        batch: B.
        length: T.
        sequences: number of packed sequences; `None` if each batch row is one sequence.
        large: largest tile, 32 or 64 tokens.
    """
    size = tokens_per_block(length, large)
    if sequences is None:
        return size
    mean: int = batch * length // sequences
    if isinstance(mean, int):  # then none of the numbers is symbolic
        return min(size, 16 if mean < 32 else 32 if mean < 64 else 64)
    return torch.sym_min(size, 16 + 16 * torch.sym_min(1, mean // 32) + 32 * torch.sym_min(1, mean // 64))


def num_blocks(length: int, size: int) -> int:
    """Return the number of blocks of `size` tokens, the last of which may be shorter.

    In this form PyTorch can prove that it is positive, without which it adds guards and `torch.export` fails.
    """
    return 1 + (length - 1) // size
