"""Process group of a program that torchrun starts: devices, meshes, agreement of ranks, time limits and rows."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = timedelta(minutes=5)  # of a collective; `time_limit` ends the program earlier
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
RESULTS, BEGUN = "results.jsonl", "begun.jsonl"  # files of rows, and of what has begun on all GPUs
WRITE_SECONDS = 3.0  # time of the first rank to write a row after a time limit, before other ranks end


class Ranks(NamedTuple):
    """Ranks of the program.

    Attributes:
        device: device of this rank.
        rank: this rank.
        world: number of ranks.
        control: group of all ranks on CPUs, through which they agree: a GPU that fails does not stop it.
    """

    device: torch.device
    rank: int
    world: int
    control: distributed.ProcessGroup

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks; each waits for the others."""
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """Return the value of the first rank."""
        values = [value]
        distributed.broadcast_object_list(values, 0, self.control)
        return values[0]

    def wait(self) -> None:
        """Wait for all ranks."""
        self.collect(None)


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the process group of torchrun, NCCL on GPUs and gloo elsewhere; yield the ranks.

    Leaves the group only after success: NCCL would wait for ranks that failed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with torchrun, even if it is killed
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    distributed.init_process_group(backend, device_id=device if cuda else None, timeout=TIMEOUT)
    control = distributed.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(control, distributed.ProcessGroup)
    yield Ranks(device, distributed.get_rank(), distributed.get_world_size(), control)
    distributed.destroy_process_group()


@contextmanager
def time_limit(seconds: float, ranks: Ranks, write: Callable[[], None]) -> Iterator[None]:
    """End the process with status 1 if the block takes longer; the first rank calls `write` before.

    A rank that failed may keep the others waiting inside a collective, which nothing else interrupts.
    """

    def end() -> None:
        if ranks.rank == 0:
            write()
        os._exit(1)

    timer = threading.Timer(seconds + (0 if ranks.rank == 0 else WRITE_SECONDS), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
