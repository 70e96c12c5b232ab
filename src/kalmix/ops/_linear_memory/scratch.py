"""Sizes of tensors that the forward pass stores for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

SUBTILE = 16  # tokens per subtile, for decays per key


def subtile_signals_shape(k: Tensor, v: Tensor, size: int, corrects: bool) -> tuple[int, ...]:
    """Return the shape of the signals of subtiles, `[2 or 3, B, T, G, K]`, for tiles of `size` tokens.

    If tiles are subtiles, nothing uses the tensor, and its axis of tokens has length 2: an `if` would add a guard on
    the length to compiled graphs, which also treat the lengths 0 and 1 as special.
    """
    batch, length, heads, _ = v.shape
    stored: int = 2 + (length - 2) * torch.sym_min(1, size // SUBTILE - 1)  # pyright: ignore[reportAssignmentType]
    return 3 if corrects else 2, batch, stored, heads, k.shape[3]
