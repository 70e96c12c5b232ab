"""One run of a command: run the missing cells, report all cells, print the files written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from kalmix_bench.runner import options, scheduler
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.experiment import CellT, Experiment
from kalmix_bench.runner.progress import progress


def run(
    experiment: Experiment[CellT],
    cells: Iterable[CellT],
    output: Path,
    console: Console,
    *,
    device: torch.device,
    jobs: int = 1,
    files: Sequence[Path] = (),
) -> None:
    """Run the cells that are missing in the folder `output`, and report all of them.

    Args:
        experiment: experiment of the cells.
        cells: cells to run and report.
        output: folder of results, tables and figures.
        console: console for progress and tables.
        device: device of the cells.
        jobs: number of processes.
        files: files that the command wrote before; printed with the others.
    """
    results = Results(output / "results.jsonl")
    with progress(console) as progress_factory:
        rows = scheduler.run(
            experiment, cells, results, device, jobs=options.count("jobs", jobs), progress_factory=progress_factory
        )
    report_files = experiment.report_run(rows, results, output, console)
    result_files = [results.path] if rows else []
    for path in (*result_files, *files, *report_files):
        console.print(f"  {path}", soft_wrap=True)
