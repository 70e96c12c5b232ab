"""Process group of a program that torchrun starts: devices, meshes, agreement of ranks, time limits and rows."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kalmix_bench.runner.json_lines import read_rows

LEAST_TIMEOUT = 300.0  # seconds of a collective; programs with a longer limit have a longer timeout
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
RESULTS, BEGUN = "results.jsonl", "begun.jsonl"  # files of rows, and of what has begun on all GPUs
MARGIN = 60.0  # seconds by which the timeout of a collective is longer than the limit of a row
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

    def read_rows(self, path: Path) -> list[dict[str, Any]]:
        """Return the rows of a file that the first rank reads. It alone writes, so no rank reads an unfinished line."""
        return self.from_first(read_rows(path) if self.rank == 0 else None)

    def wait(self) -> None:
        """Wait for all ranks."""
        self.collect(None)


@contextmanager
def process_group(limit: float) -> Iterator[Ranks]:
    """Join the process group of torchrun, NCCL on GPUs and gloo elsewhere; yield the ranks.

    Leaves the group only after success, when all ranks have ended their work: NCCL would wait for ranks that failed.
    Collectives do not time out within `limit` seconds, the time limit of a row. Programs end with `end_process`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with torchrun, even if it is killed
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=max(LEAST_TIMEOUT, limit + MARGIN))
    backend = "nccl" if cuda else "gloo"
    distributed.init_process_group(backend, device_id=device if cuda else None, timeout=timeout)
    control = distributed.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, distributed.ProcessGroup)
    ranks = Ranks(device, distributed.get_rank(), distributed.get_world_size(), control)
    yield ranks
    ranks.wait()
    if cuda:
        distributed.destroy_process_group()


def end_process(status: int) -> NoReturn:
    """End the process without destructors: those of gloo's groups sometimes abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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


def too_long(limit: float, during: str = "") -> str:
    """Return why a row was cut by the time limit, and which option to raise."""
    when = f" {during}" if during else ""
    reason = "Kernels may still be compiling, or a rank may have failed or wait for another"
    return f"took longer than {limit:g} s{when}. {reason}. To run it again with more time, raise --limit"


def has_ended(rows: Sequence[dict[str, Any]], begun: int, limit: float) -> bool:
    """Return whether something has its result, or ended an earlier program, and must not run again.

    A row that was cut by the time limit runs again with a longer one.

    Args:
        rows: its rows, oldest first. `limit` of a row is the time limit that cut it.
        begun: how many times it began.
        limit: seconds that it may take now.
    """
    if begun > len(rows):
        return True
    return bool(rows) and rows[-1].get("limit", math.inf) >= limit


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
