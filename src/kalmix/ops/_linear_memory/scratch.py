"""Sizes of tensors that the forward pass stores for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

SUBTILE = 16  # tokens per subtile, for decays per key


def subtile_signals_shape(k: Tensor, v: Tensor, size: int, corrects: bool) -> tuple[int, ...]:
    """Return the shape of the signals of subtiles; nothing uses them if tiles of `size` tokens are subtiles.

    There is room for two tokens then, by the same formula as for other sizes: a graph for all lengths has no branch,
    and asks whether an axis is empty or has one entry.
    """
    batch, length, heads, _ = v.shape
    stored: int = 2 + (length - 2) * torch.sym_min(1, size // SUBTILE - 1)  # pyright: ignore[reportAssignmentType]
    return 3 if corrects else 2, batch, stored, heads, k.shape[3]
