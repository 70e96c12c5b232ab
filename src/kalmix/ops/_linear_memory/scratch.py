"""Sizes of tensors that the forward pass stores for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

SUBTILE = 16  # tokens per subtile, for decays per key


def subtile_signals_size(k: Tensor, v: Tensor, size: int, corrects: bool) -> int:
    """Return the number of elements of the signals of subtiles, `[2 or 3, B, T, G, K]`, for tiles of `size` tokens.

    If tiles are subtiles, nothing uses them, and T is 2. The tensor has one axis, and this formula has no `if`, because
    both would add guards on the length to compiled and exported programs.
    """
    batch, length, heads, _ = v.shape
    tokens: int = 2 + (length - 2) * torch.sym_min(1, size // SUBTILE - 1)  # pyright: ignore[reportAssignmentType]
    return (3 if corrects else 2) * batch * tokens * heads * k.shape[3]
