"""`kalmix bench solvers`: how well the solvers of a ridge regression do, forwards, backwards and in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from kalmix.cli import options
from kalmix.cli import solvers_report as report
from kalmix.errors import ArgumentError
from kalmix.tasks.solvers.convergence import Tell
from kalmix.training.solvers import PRESETS, STUDIES, Cell, Follow, Results
from kalmix.training.solvers import run as run_cells


def run(
    preset: Annotated[str, typer.Option(help="laptop: minutes on two cores. paper: in full, for a GPU.")] = "laptop",
    study: Annotated[str, typer.Option(help="One or more, separated by commas.")] = ",".join(STUDIES),
    seeds: Annotated[int, typer.Option(help="How many, from 0.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    output: Annotated[Path, typer.Option(help="For numbers and pictures; what it holds is not run again.")] = Path(
        "runs/solvers"
    ),
) -> None:
    """Solvers of a ridge regression (Figures 1, 5 and 9 of Gated KalmaNet): residuals, gradients, conditions."""
    wanted = options.names("study", study, tuple(STUDIES))
    if preset not in PRESETS:
        raise ArgumentError("preset", got=repr(preset), needs=f"one of {', '.join(PRESETS)}")
    if seeds < 1:
        raise ArgumentError("seeds", got=seeds, needs="at least 1")
    where, console, results = options.device(device), Console(highlight=False), Results(output / "results.jsonl")
    written = []
    for name in wanted:
        cells = [Cell(name, PRESETS[preset][name], seed) for seed in range(seeds)]
        with _progress(console) as follow:
            rows = run_cells(cells, results, where, follow)
        written.append(report.REPORTS[name](rows, output / f"{name}.png", console))
    for path in (results.path, *written):
        console.print(f"  {path}", soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Follow]:
    """A bar a seed of a study on a terminal; elsewhere a line when it is done."""
    columns = (TextColumn("{task.description:>20}"), BarColumn(30), TaskProgressColumn())
    with Progress(*columns, TextColumn("{task.fields[told]}"), console=console, disable=not console.is_terminal) as bar:

        def follow(study: str, seed: int) -> Tell:
            task = bar.add_task(f"{study}  seed {seed}", total=1.0, told="")

            def tell(done: float, told: str) -> None:
                bar.update(task, completed=done, told=told)
                if bar.disable and done == 1:
                    console.print(f"{study}  seed {seed}  {told}", soft_wrap=True)

            return tell

        yield follow
