"""`kalmix bench solvers`: how well the solvers of a ridge regression do, forwards, backwards and in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix_bench.experiments.solvers import PRESETS, STUDIES, Cell, report
from kalmix_bench.experiments.solvers import run as run_cells
from kalmix_bench.runner import options
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.progress import progress


def run(
    preset: Annotated[str, typer.Option(help="laptop: minutes on two cores. paper: in full, for a GPU.")] = "laptop",
    study: Annotated[str, typer.Option(help="One or more, separated by commas.")] = ",".join(STUDIES),
    seeds: options.Seeds = 1,
    jobs: options.Jobs = 1,
    device: options.Device = None,
    output: Annotated[Path, typer.Option(help="For numbers and pictures; what it holds is not run again.")] = Path(
        "runs/solvers"
    ),
) -> None:
    """Solvers of a ridge regression (Figures 1, 5 and 9 of Gated KalmaNet): residuals, gradients, conditions."""
    wanted = options.names("study", study, tuple(STUDIES))
    chosen, every = options.preset(preset, PRESETS), range(options.count("seeds", seeds))
    where, console, results = options.device(device), Console(highlight=False), Results(output / "results.jsonl")
    cells = [Cell(name, chosen[name], seed) for name in wanted for seed in every]
    with progress(console) as follow:
        rows = run_cells(cells, results, where, jobs=options.count("jobs", jobs), follow=follow)
    written = report.tell(list(rows.values()), output, console)
    for path in (results.path, *written):
        console.print(f"  {path}", soft_wrap=True)
