"""Process group of a program that torchrun starts: its device, meshes, and sums over ranks; its options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the process group of torchrun, NCCL on GPUs and gloo elsewhere; yield this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def check_names(parser: argparse.ArgumentParser, option: str, names: Iterable[str], accepted: Iterable[str]) -> None:
    """Check that an option has known names only; otherwise end the program with status 2."""
    known = list(accepted)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{option} has {unknown[0]!r}; expected some of {known}")


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
