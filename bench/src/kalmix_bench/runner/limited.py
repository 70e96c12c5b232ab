"""Sweeps on chosen devices within a time limit: worker processes, margins before the deadline, and the exit status."""

from __future__ import annotations

import math
import time
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console

from kalmix_bench.runner import options
from kalmix_bench.runner.workers import WorkerConfig

SAVING = 15.0  # seconds before the deadline at which cells store a checkpoint and stop; at most a quarter of it
ENDING = 4.0  # seconds before the deadline at which those that have not stopped are terminated; at most a tenth
UNFINISHED = 3  # exit status

Devices = Annotated[
    str | None, typer.Option(help="all (GPUs), cpu, or some GPUs, such as 0,1. Default: all, or cpu without GPUs.")
]
JobsPerDevice = Annotated[int, typer.Option(help="Cells to run at once per device, one process each.")]
Deadline = Annotated[float | None, typer.Option(help="Seconds after which the command ends. Default: none.")]


class LimitedSweep(NamedTuple):
    """Worker processes of a command, and their device.

    Attributes:
        workers: processes and time limits.
        device: device of PyTorch.
    """

    workers: WorkerConfig
    device: torch.device

    @classmethod
    def of(cls, devices: str | None, jobs_per_device: int, deadline: float | None) -> LimitedSweep:
        """Return the processes of these options; the deadline counts from now.

        Raises:
            ArgumentError: a device does not exist, or a number is not positive.
        """
        began, gpus = time.monotonic(), options.gpus(devices)
        workers = gpus * options.count("jobs-per-device", jobs_per_device)
        seconds = math.inf if deadline is None else options.positive("deadline", deadline)
        stop, end = (began + seconds - min(margin, seconds * part) for margin, part in ((SAVING, 0.25), (ENDING, 0.1)))
        device = torch.device("cuda" if any(gpus) else "cpu")
        return cls(WorkerConfig(workers, stop, end, failures={}), device)

    def report_failures(self) -> None:
        """Print the cells that failed, with their reasons, to the standard error."""
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        for cell, reason in (self.workers.failures or {}).items():
            console.print(f"error: {cell}: {reason.strip()}")

    def exit_unless_finished(self, finished: int, cells: int, console: Console) -> None:
        """Exit with a status if cells are missing: 1 if one failed, otherwise 3.

        Args:
            finished: number of finished cells.
            cells: number of cells.
            console: console for the message.
        """
        if finished < cells:
            message = f"{finished} of {cells} cells are finished; the same command continues with the others"
            console.print(message, soft_wrap=True)
            raise typer.Exit(1 if self.workers.failures else UNFINISHED)
