"""Differentiable exchange of tensors between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def gather(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return tensors of all ranks, `[world, ...]` each; ranks must pass equal shapes.

    Tensors of one dtype are sent together. The backward pass sums the gradients of all ranks, and each rank receives
    that of its own tensors. Every rank must use a result of each dtype in its backward pass, or the others wait.
    """
    from torch.distributed import _functional_collectives as collectives

    older, newer = "all_gather_tensor_autograd", "all_gather_single_autograd"  # torch 2.13 deprecates the older name
    all_gather = getattr(collectives, newer if hasattr(collectives, newer) else older)
    results: list[Tensor] = list(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        chosen = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in chosen])
        gathered = all_gather(flat, 0, group).view(group.size(), -1)
        parts = gathered.split([tensors[i].numel() for i in chosen], 1)
        for i, part in zip(chosen, parts, strict=True):
            results[i] = part.unflatten(1, tensors[i].shape)
    return results
