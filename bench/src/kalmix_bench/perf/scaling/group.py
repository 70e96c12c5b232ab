"""Process group of a program that torchrun starts: its device, meshes, and sums over ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the process group of torchrun, NCCL on GPUs and gloo elsewhere; give this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def make_mesh(device: torch.device, *sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Build a mesh of all ranks; by default of one dimension."""
    return init_device_mesh(device.type, sizes or (distributed.get_world_size(),), mesh_dim_names=names)


def summed(x: Tensor) -> Tensor:
    """Return the sum of `x` over all ranks, without gradients."""
    x = x.detach().clone()
    distributed.all_reduce(x)
    return x


def largest(x: float, device: torch.device) -> float:
    """Return the largest `x` of all ranks."""
    value = torch.tensor(x, dtype=torch.float64, device=device)
    distributed.all_reduce(value, distributed.ReduceOp.MAX)
    return float(value)
