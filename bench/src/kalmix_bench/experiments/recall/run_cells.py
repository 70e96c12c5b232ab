"""Command `kalmix bench run`: run the cells of a file on all GPUs until they are finished or time is up."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kalmix_bench.experiments.recall.cell_line import parse_cell
from kalmix_bench.experiments.recall.experiment import Recall
from kalmix_bench.runner import cell_file, options, scheduler
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.progress import progress
from kalmix_bench.runner.workers import WorkerConfig

SAVING = 15.0  # seconds before the deadline at which cells store a checkpoint and stop; at most a quarter of it
ENDING = 4.0  # seconds before the deadline at which those that have not stopped are terminated; at most a tenth
UNFINISHED = 3  # exit status


def run(
    cells: Annotated[Path, typer.Argument(help="Cell file (JSON lines), as `kalmix bench mad --write` writes it.")],
    devices: Annotated[
        str | None, typer.Option(help="all (GPUs), cpu, or some GPUs, such as 0,1. Default: all, or cpu without GPUs.")
    ] = None,
    jobs_per_device: Annotated[int, typer.Option(help="Cells to run at once per device, one process each.")] = 1,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which the command ends. Default: none.")] = None,
    output: Annotated[Path, typer.Option(help="Output folder; finished cells in it are skipped.")] = Path("runs/cells"),
) -> None:
    """Run the cells of a file; the same command resumes cells that the deadline stopped.

    Exit status: 0 if all cells are finished, 3 if the deadline came first, 1 if a cell failed.
    """
    began, console = time.monotonic(), Console(highlight=False)
    cell_list = cell_file.read(cells, parse_cell)
    gpus = options.gpus(devices)
    workers = gpus * options.count("jobs-per-device", jobs_per_device)
    seconds = math.inf if deadline is None else options.positive("deadline", deadline)
    stop, end = (began + seconds - min(margin, seconds * part) for margin, part in ((SAVING, 0.25), (ENDING, 0.1)))
    worker_config = WorkerConfig(workers, stop, end, failures={})
    results, device = Results(output / "results.jsonl"), torch.device("cuda" if any(gpus) else "cpu")
    with progress(console) as progress_factory:
        rows = scheduler.run(
            Recall(), cell_list, results, device, progress_factory=progress_factory, worker_config=worker_config
        )
    for cell, reason in (worker_config.failures or {}).items():
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"error: {cell}: {reason.strip()}")
    if len(rows) == len(cell_list):
        for path in (results.path, *Recall().report_run(rows, results, output, console)):
            console.print(f"  {path}", soft_wrap=True)
        return
    message = f"{len(rows)} of {len(cell_list)} cells are finished; the same command continues with the others"
    console.print(message, soft_wrap=True)
    raise typer.Exit(1 if worker_config.failures else UNFINISHED)
