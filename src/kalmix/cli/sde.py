"""`kalmix bench sde`: predicting linear stochastic differential equations, beside who knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kalmix.cli import options
from kalmix.cli import sde_report as report
from kalmix.errors import ArgumentError
from kalmix.tasks.sde.models import MODELS
from kalmix.tasks.sde.settings import SETTINGS
from kalmix.training.sde import PRESETS, REFERENCES, Cell, Follow, Results, Tell
from kalmix.training.sde import run as run_cells


def run(
    preset: Annotated[str, typer.Option(help="laptop: a minute a model and seed. paper: in full.")] = "laptop",
    settings: Annotated[str, typer.Option(help="Noises and samplings, by name.")] = ",".join(SETTINGS),
    models: Annotated[str, typer.Option(help="To train, by name.")] = ",".join(MODELS),
    seeds: Annotated[int, typer.Option(help="How many, from 0.")] = 1,
    epochs: Annotated[int | None, typer.Option(help="Of training; as the preset says if absent.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    output: Annotated[Path, typer.Option(help="For numbers and pictures; what it holds is not run again.")] = Path(
        "runs/sde"
    ),
) -> None:
    """Linear SDEs (section 4.3 of Adaptive Filter Attention): the next measurement, learned and at best."""
    wanted = options.names("settings", settings, tuple(SETTINGS))
    named = options.names("models", models, tuple(MODELS))
    if preset not in PRESETS:
        raise ArgumentError("preset", got=repr(preset), needs=f"one of {', '.join(PRESETS)}")
    if seeds < 1:
        raise ArgumentError("seeds", got=seeds, needs="at least 1")
    protocol = PRESETS[preset] if epochs is None else replace(PRESETS[preset], epochs=epochs)
    where, console, results = options.device(device), Console(highlight=False), Results(output / "results.jsonl")
    report.unlearned(wanted, console)
    every = range(seeds)
    cells = [Cell(setting, model, seed) for setting in wanted for model in (REFERENCES, *named) for seed in every]
    with _progress(console) as follow:
        rows = run_cells(cells, protocol, results, where, follow)
    written = [report.errors(rows, output, console), *report.pictures(rows, protocol, results, output)]
    for path in (results.path, *written):
        console.print(f"  {path}", soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Follow]:
    """A bar a cell on a terminal; elsewhere a line when it is done."""
    columns = (TextColumn("{task.description:>32}"), BarColumn(30), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[told]}"), console=console, disable=not console.is_terminal) as bar:

        def follow(setting: str, model: str, seed: int) -> Tell:
            task = bar.add_task(f"{setting}  {model}  seed {seed}", total=1.0, told="")

            def tell(done: float, error: float) -> None:
                bar.update(task, completed=done, told=f"error {error:.4g}")
                if bar.disable and done == 1:
                    console.print(f"{setting}  {model}  seed {seed}  error {error:.4g}", soft_wrap=True)

            return tell

        yield follow
