"""Base class of the commands that measure whole models: one process a row, a deadline, and continuation."""

from __future__ import annotations

import math
import platform
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from kalmix.errors import ArgumentError
from kalmix.files import FORMAT
from kalmix.training.provenance import provenance
from kalmix_bench.runner import markdown_console, options, scheduler
from kalmix_bench.runner.cells import Cell, Results, Row
from kalmix_bench.runner.experiment import CellStopped, CellT, Experiment, ProgressFn
from kalmix_bench.runner.markdown_console import RecordingConsole
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.progress import progress
from kalmix_bench.runner.workers import WorkerConfig

MEASURING = 12.0  # seconds before the deadline at which the last row may begin its timed part
ENDING = 4.0  # seconds before the deadline at which processes are terminated
UNFINISHED = 3  # exit status
RETRIED = "not installed"  # status of rows that run again


class ModelRows(Experiment[CellT]):
    """Measurements of whole models, one model a row.

    Args:
        limit: seconds after which a row is given up.
        processes: number of processes that prepare side by side.
        prepare_only: whether rows end before they are timed and are not written. They fill the caches of compilers.
    """

    keys = frozenset(("model", "mode", "size", "status"))
    in_all = False

    def __init__(self, limit: float = math.inf, processes: int = 1, *, prepare_only: bool = False) -> None:
        super().__init__()  # cells have the commit, so that rows of an older one are measured again
        self.limit, self.processes, self.prepare_only = limit, processes, prepare_only

    @abstractmethod
    def measure(self, cell: CellT, device: torch.device, on_prepared: Callable[[], None]) -> Row:
        """Return the measurements of a row; call `on_prepared` when all that is left is timed alone."""

    @abstractmethod
    def summary(self, row: Row) -> str:
        """Return one line of a row."""

    @abstractmethod
    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return the tables of rows."""

    @abstractmethod
    def shown(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that a report shows."""

    def run(
        self, cells: tuple[CellT, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> list[Row]:
        def prepared() -> None:
            if on_progress(0.5, "first step done") or self.prepare_only:
                raise CellStopped

        (cell,) = cells
        row = self.measure(cell, device, prepared)
        on_progress(0.99, self.summary(row))
        if self.prepare_only:  # it could not be prepared; the run that measures writes the reason
            raise CellStopped
        return [{"commit": cell.to_dict()["commit"], "processes": self.processes, **row}]

    def is_complete(self, cell: CellT, results: Results) -> bool:
        return results.rows([cell])[cell]["status"] != RETRIED

    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        recorder = RecordingConsole(console)
        for table in self.tables(rows):
            recorder.print(table)
        return [markdown_console.write({self.name: recorder.tables}, output / "report.md")]

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        return []


class Hardware(NamedTuple):
    """Devices of a command.

    Attributes:
        gpus: value of CUDA_VISIBLE_DEVICES for each process, as in `WorkerConfig`.
        device: device of PyTorch.
        name: name of the device.
        commit: commit of kalmix.
    """

    gpus: list[str | None]
    device: torch.device
    name: str
    commit: str | None

    @classmethod
    def of(cls, devices: str | None, jobs: int) -> Hardware:
        """Return the devices that the option --devices names, each `jobs` times; by default one GPU, or the CPU."""
        gpus = options.gpus(devices)[: None if devices else 1] * jobs
        device = torch.device("cuda" if any(gpus) else "cpu")
        name = torch.cuda.get_device_name() if any(gpus) else f"{platform.machine()} cpu"
        return cls(gpus, device, name, provenance(device)["commit"])


def deadline_after(seconds: float | None) -> float:
    """Return the time of `time.monotonic` at which a command ends."""
    return time.monotonic() + (math.inf if seconds is None else options.positive("deadline", seconds))


def measure_rows(
    experiment: ModelRows[CellT], cells: Sequence[CellT], results: Results, hardware: Hardware, end: float
) -> None:
    """Measure the rows that are missing, each in a process of its own.

    Args:
        experiment: measures a row.
        cells: rows.
        results: file of rows.
        hardware: devices.
        end: time of `time.monotonic` at which rows that are not finished are given up.
    """
    config = WorkerConfig(hardware.gpus, end - MEASURING, end - ENDING, failures={}, one_batch=True)
    results.path.parent.mkdir(parents=True, exist_ok=True)
    with progress(Console(highlight=False)) as factory:
        scheduler.run(experiment, cells, results, hardware.device, progress_factory=factory, worker_config=config)
    if not experiment.prepare_only:
        results.add(_row_of_failure(cell, hardware, reason) for cell, reason in (config.failures or {}).items())


def report_rows(experiment: ModelRows[CellT], cells: Sequence[CellT] | None, results: Results) -> None:
    """Print the tables, write them to report.md, and exit with a status unless all rows are there and finite.

    Args:
        experiment: makes the tables.
        cells: rows that should be there; `None` if those of the file are to be reported.
        results: file of rows.
    """
    console, output = Console(highlight=False), results.path.parent
    found = experiment.shown(experiment.select(results.read()))
    if cells is None and not found:
        raise ArgumentError("output", got=repr(str(output)), expected="an output folder of this command")
    for path in (results.path, *experiment.report(found, output, console)):
        console.print(f"  {path}", soft_wrap=True)
    if cells is not None and (missing := len(cells) - len(results.rows(cells))):
        message = f"{missing} of {len(cells)} rows are missing; the same command continues with them"
        console.print(message, soft_wrap=True)
        raise typer.Exit(UNFINISHED)
    if not all(row.get("finite", True) for row in found):
        raise typer.Exit(1)


def _row_of_failure(cell: Cell, hardware: Hardware, reason: str) -> Row:
    """Return the row of a cell whose process died."""
    origin = {"seconds": 0.0, "format": FORMAT, "peak_memory": None, **provenance(torch.device("cpu"))}
    return {
        **cell.to_dict(),
        **origin,
        "device": hardware.name,
        "commit": hardware.commit,
        "status": "failed",
        "reason": reason,
    }
