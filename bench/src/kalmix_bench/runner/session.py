"""One run of a command: run the cells that are missing, report all of them, and print what was written."""

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
    written: Sequence[Path] = (),
) -> None:
    """Run the cells that the folder `output` lacks, and report all of them.

    Args:
        experiment: of the cells.
        cells: that were asked for.
        output: folder of results, tables and pictures.
        console: where progress and tables are printed.
        device: that cells run on.
        jobs: number of processes.
        written: paths of files that the command wrote before.
    """
    results = Results(output / "results.jsonl")
    with progress(console) as progress_factory:
        rows = scheduler.run(
            experiment, cells, results, device, jobs=options.count("jobs", jobs), progress_factory=progress_factory
        )
    reported = experiment.report_run(rows, results, output, console)
    stored = [results.path] if rows else []
    for path in (*stored, *written, *reported):
        console.print(f"  {path}", soft_wrap=True)
