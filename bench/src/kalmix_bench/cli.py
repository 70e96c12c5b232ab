"""`kalmix bench`: the commands of all experiments; `all` of them; and `report`, what their results say together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.rule import Rule

from kalmix_bench.experiments.collision.experiment import Collision
from kalmix_bench.experiments.recall import beliefs, run_cells
from kalmix_bench.experiments.recall.experiment import Recall
from kalmix_bench.experiments.sde.experiment import Sde
from kalmix_bench.experiments.solvers.experiment import Solvers
from kalmix_bench.experiments.vision.experiment import Vision
from kalmix_bench.runner import options
from kalmix_bench.runner import report as bench_report
from kalmix_bench.runner.experiment import Experiment

EXPERIMENTS: tuple[Experiment[Any], ...] = (Recall(), Collision(), Solvers(), Sde(), Vision())

app = typer.Typer(name="bench", help="The experiments of the papers, one a command.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """A group."""


def run_all(
    preset: Annotated[
        str, typer.Option(help="laptop: half an hour on two cores. paper: in full, for a GPU.")
    ] = "laptop",
    seeds: options.Seeds = 1,
    jobs: options.Jobs = 1,
    device: options.Device = None,
    output: Annotated[Path, typer.Option(help="For results; what it holds is not run again.")] = Path("runs/all"),
) -> None:
    """All experiments and benchmarks of the papers; goes on where it was interrupted."""
    options.preset(preset, dict.fromkeys(("laptop", "paper")))
    options.count("seeds", seeds)
    options.count("jobs", jobs)
    options.device(device)
    console, folders = Console(highlight=False), []
    for experiment in (experiment for experiment in EXPERIMENTS if experiment.in_all):
        less = experiment.laptop if preset == "laptop" else {}
        for name, command in experiment.commands().items():
            console.print(Rule(name, align="left"))
            folders.append(output / name)
            command(preset=preset, seeds=seeds, jobs=jobs, device=device, output=folders[-1], **less)
    console.print(Rule("report", align="left"))
    report(folders, output)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Outputs of `kalmix bench`.")],
    output: Annotated[Path | None, typer.Option(help="For tables and pictures; the first folder if absent.")] = None,
) -> None:
    """Report results of benches: tables (report.md, report.csv) and pictures, papers' figures beside ours."""
    console = Console(highlight=False)
    rows = bench_report.read(folders, EXPERIMENTS)
    for path in bench_report.write(rows, output or folders[0], console, EXPERIMENTS):
        console.print(f"  {path}", soft_wrap=True)


for experiment in EXPERIMENTS:
    for name, command in experiment.commands().items():
        app.command(name=name)(command)
for name, command in (("all", run_all), ("report", report), ("beliefs", beliefs.run), ("run", run_cells.run)):
    app.command(name=name)(command)
