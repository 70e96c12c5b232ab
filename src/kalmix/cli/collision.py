"""`kalmix bench collision`: what one address costs another, with nothing learned and with five models trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kalmix.cli import collision_report as report
from kalmix.cli import options
from kalmix.errors import ArgumentError
from kalmix.tasks.collision.mechanism import Setting
from kalmix.tasks.collision.models import UPDATES
from kalmix.training.collision import PRESETS, STUDIES, Cell, Follow, Protocol, Results, Tell
from kalmix.training.collision import run as run_cells

PARTS = ("mechanism", *STUDIES)


def run(
    preset: Annotated[str, typer.Option(help="laptop: minutes on two cores. paper: in full, for a GPU.")] = "laptop",
    parts: Annotated[str, typer.Option(help="Of mechanism (nothing learned), recall and crowding.")] = ",".join(PARTS),
    models: Annotated[str, typer.Option(help="To train, by name.")] = ",".join(UPDATES),
    seeds: Annotated[int, typer.Option(help="How many, from 0; those of a model train side by side.")] = 3,
    overlap: Annotated[float, typer.Option(help="Of the two addresses of the mechanism.")] = 0.92,
    steps: Annotated[int | None, typer.Option(help="Of training; as the preset says if absent.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step; as the preset says if absent.")] = None,
    tests: Annotated[int | None, typer.Option(help="Sequences a test; as the preset says if absent.")] = None,
    queries: Annotated[str, typer.Option(help="read alone, or write first, as other tokens do.")] = "read",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    output: Annotated[Path, typer.Option(help="For numbers and pictures; what it holds is not run again.")] = Path(
        "runs/collision"
    ),
) -> None:
    """Collisions of addresses (section 4.1 of Memory by Design): mechanism, learned recall, crowding."""
    wanted = options.names("parts", parts, PARTS)
    named = options.names("models", models, tuple(UPDATES))
    if seeds < 1:
        raise ArgumentError("seeds", got=seeds, needs="at least 1")
    if not 0 <= overlap < 1:
        raise ArgumentError("overlap", got=overlap, needs="at least 0 and below 1")
    protocol = _protocol(preset, steps=steps, batch=batch, tests=tests, queries=queries)
    where = options.device(device)
    console = Console(highlight=False)
    output.mkdir(parents=True, exist_ok=True)
    written = report.mechanism(Setting(), overlap, output, console) if "mechanism" in wanted else []
    results = Results(output / "results.jsonl")
    for study in (part for part in wanted if part in STUDIES):
        cells = [Cell(study, model, seed) for model in named for seed in range(seeds)]
        with _progress(console) as follow:
            rows = run_cells(cells, protocol, results, where, follow)
        written += report.learned(study, list(rows.values()), output, console)
    for path in written:
        console.print(f"  {path}", soft_wrap=True)


def _protocol(preset: str, **changes: int | str | None) -> Protocol:
    if preset not in PRESETS:
        raise ArgumentError("preset", got=repr(preset), needs=f"one of {', '.join(PRESETS)}")
    return replace(PRESETS[preset], **{name: value for name, value in changes.items() if value is not None})


@contextmanager
def _progress(console: Console) -> Iterator[Follow]:
    """A bar a model on a terminal; elsewhere a line when it has learned."""
    columns = (TextColumn("{task.description:>26}"), BarColumn(30), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[told]}"), console=console, disable=not console.is_terminal) as bar:

        def follow(study: str, model: str) -> Tell:
            task = bar.add_task(f"{study}  {model}", total=1.0, told="")

            def tell(done: float, loss: float) -> None:
                bar.update(task, completed=done, told=f"loss {loss:.3f}")
                if bar.disable and done == 1:
                    console.print(f"{study}  {model}  loss {loss:.3f}", soft_wrap=True)

            return tell

        yield follow
