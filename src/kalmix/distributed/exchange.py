"""Differentiable exchange of tensors between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SMALL = 1 << 20  # `sum_over_ranks` sends tensors of fewer elements together


def gather(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return tensors of all ranks, `[world, ...]` each; ranks must pass equal shapes.

    Tensors of one dtype are sent together. The backward pass sums the gradients of all ranks, and each rank receives
    that of its own tensors. Every rank must use a result of each dtype in its backward pass, or the others wait.
    """
    if not torch.compiler.is_compiling() and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return _send(tensors, group, _all_gather)
    from torch.distributed import _functional_collectives as collectives

    older, newer = "all_gather_tensor_autograd", "all_gather_single_autograd"  # torch 2.13 deprecates the older name
    all_gather = getattr(collectives, newer if hasattr(collectives, newer) else older)
    return _send(tensors, group, lambda flat, group: all_gather(flat, 0, group))


def _all_gather(flat: Tensor, group: ProcessGroup) -> Tensor:
    older, newer = "all_gather_into_tensor", "all_gather_single"  # torch 2.13 deprecates the older name
    gathered = flat.new_empty(group.size() * flat.numel())
    getattr(distributed, newer if hasattr(distributed, newer) else older)(gathered, flat, group=group)
    return gathered


def _send(
    tensors: Sequence[Tensor], group: ProcessGroup, all_gather: Callable[[Tensor, ProcessGroup], Tensor]
) -> list[Tensor]:
    """Gather tensors, those of one dtype together."""
    results: list[Tensor] = list(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        chosen = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in chosen])
        gathered = all_gather(flat, group).view(group.size(), -1)
        parts = gathered.split([tensors[i].numel() for i in chosen], 1)
        for i, part in zip(chosen, parts, strict=True):
            results[i] = part.unflatten(1, tensors[i].shape)
    return results


def sum_over_ranks(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Replace tensors by their sums over all ranks, in place, without gradients; send small ones together.

    Tensors of a subclass, such as `DTensor`, are sent one by one.
    """
    from torch.distributed import all_reduce

    plain = [x for x in tensors if type(x) is Tensor]
    small = [x for x in plain if x.numel() < SMALL]
    together = {id(x) for x in small}
    works = [all_reduce(x, group=group, async_op=True) for x in tensors if id(x) not in together]
    for dtype in dict.fromkeys(x.dtype for x in small):
        chosen = [x for x in small if x.dtype == dtype]
        flat = torch.cat([x.reshape(-1) for x in chosen])
        all_reduce(flat, group=group)
        for x, part in zip(chosen, flat.split([x.numel() for x in chosen]), strict=True):
            x.copy_(part.view(x.shape))
    for work in works:
        if work is not None:
            work.wait()


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of numbers on a device; unlike `torch.tensor`, the host does not wait for a GPU."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
