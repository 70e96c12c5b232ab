"""Command group `kalmix bench`: one command per experiment, `all`, `report`, `beliefs`, `run` and `perf`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.rule import Rule

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.collision.experiment import Collision
from kalmix_bench.experiments.language.experiment import Language
from kalmix_bench.experiments.recall import beliefs, run_cells
from kalmix_bench.experiments.recall.experiment import Recall
from kalmix_bench.experiments.sde.experiment import Sde
from kalmix_bench.experiments.solvers.experiment import Solvers
from kalmix_bench.experiments.vision.experiment import Vision
from kalmix_bench.perf.commands import app as perf
from kalmix_bench.runner import options
from kalmix_bench.runner import report as bench_report
from kalmix_bench.runner.experiment import Experiment

EXPERIMENTS: tuple[Experiment[Any], ...] = (Recall(), Collision(), Solvers(), Sde(), Vision(), Language())

app = typer.Typer(name="bench", help="Run the papers' experiments, one command each.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make typer treat `bench` as a group of commands."""


def run_all(
    preset: Annotated[
        str, typer.Option(help="laptop: half an hour on two cores. paper: full size, for a GPU.")
    ] = "laptop",
    seeds: options.Seeds = 1,
    jobs: options.Jobs = 1,
    device: options.Device = None,
    output: Annotated[Path, typer.Option(help="Output folder; finished cells in it are skipped.")] = Path("runs/all"),
) -> None:
    """Run all experiments of the papers and report them. The same command resumes an interrupted run."""
    options.preset(preset, dict.fromkeys(("laptop", "paper")))
    options.count("seeds", seeds)
    options.count("jobs", jobs)
    options.device(device)
    console, folders = Console(highlight=False), []
    for experiment in (experiment for experiment in EXPERIMENTS if experiment.in_all):
        laptop_options = experiment.laptop if preset == "laptop" else {}
        for name, command in experiment.commands().items():
            console.print(Rule(name, align="left"))
            folders.append(output / name)
            command(preset=preset, seeds=seeds, jobs=jobs, device=device, output=folders[-1], **laptop_options)
    console.print(Rule("report", align="left"))
    report(folders, output)


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Output folders of `kalmix bench` commands; with --papers: `bench/results`.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder for tables and figures. Default: the first folder.")
    ] = None,
    papers: Annotated[
        Path | None,
        typer.Option(help="Instead: page to write, with the status of each table and figure of the four papers."),
    ] = None,
) -> None:
    """Write report.md, report.csv and figures of the results in one or more output folders, next to the papers'
    figures. With --papers, compare committed results with all tables and figures of the papers.
    """
    console = Console(highlight=False)
    if papers is not None:
        if len(folders) != 1:
            got = f"{len(folders)} folders"
            raise ArgumentError("folders", got=got, expected="one folder with --papers: `bench/results` of a clone")
        from kalmix_bench.papers import page
        from kalmix_bench.papers.entries import read_papers
        from kalmix_bench.papers.quantities import CommittedResults

        page.write(read_papers(), CommittedResults(folders[0], EXPERIMENTS), papers)
        console.print(f"  {papers}", soft_wrap=True)
        return
    rows = bench_report.read(folders, EXPERIMENTS)
    for path in bench_report.write(rows, output or folders[0], console, EXPERIMENTS):
        console.print(f"  {path}", soft_wrap=True)


for experiment in EXPERIMENTS:
    for name, command in experiment.commands().items():
        app.command(name=name)(command)
for name, command in (("all", run_all), ("report", report), ("beliefs", beliefs.run), ("run", run_cells.run)):
    app.command(name=name)(command)
app.add_typer(perf)
