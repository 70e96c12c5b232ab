"""Command `kalmix bench run`: run the cells of a file on all GPUs until they are finished or time is up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix_bench.experiments.recall.cell_line import parse_cell
from kalmix_bench.experiments.recall.experiment import Recall
from kalmix_bench.runner import cell_file, limited, options, scheduler
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.limited import LimitedSweep
from kalmix_bench.runner.progress import progress


def run(
    cells: Annotated[Path, typer.Argument(help="Cell file (JSON lines), as `kalmix bench mad --write` writes it.")],
    devices: limited.Devices = None,
    jobs_per_device: limited.JobsPerDevice = 1,
    deadline: limited.Deadline = None,
    commit: options.Commit = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder for rows of tasks. Default: each cell draws its own.")
    ] = None,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Round operands of matrix products to TF32 on a GPU, which is faster.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Output folder; finished cells in it are skipped.")] = Path("runs/cells"),
) -> None:
    """Run the cells of a file; the same command resumes cells that the deadline stopped.

    Exit status: 0 if all cells are finished, 3 if the deadline came first, 1 if a cell failed.
    """
    console, cell_list = Console(highlight=False), cell_file.read(cells, parse_cell)
    sweep, results = LimitedSweep.of(devices, jobs_per_device, deadline), Results(output / "results.jsonl")
    experiment = Recall(commit, data, tf32=tf32)
    with progress(console) as progress_factory:
        rows = scheduler.run(
            experiment, cell_list, results, sweep.device, progress_factory=progress_factory, worker_config=sweep.workers
        )
    sweep.report_failures()
    sweep.exit_unless_finished(len(rows), len(cell_list), console)
    for path in (results.path, *experiment.report_run(rows, results, output, console)):
        console.print(f"  {path}", soft_wrap=True)
