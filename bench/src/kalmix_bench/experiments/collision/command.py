"""`kalmix bench collision`: what one address costs another, with nothing learned and with five models trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.collision import PRESETS, STUDIES, Cell, report
from kalmix_bench.experiments.collision import run as run_cells
from kalmix_bench.experiments.collision.mechanism import Setting
from kalmix_bench.experiments.collision.models import UPDATES
from kalmix_bench.runner import options
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.progress import progress

PARTS = ("mechanism", *STUDIES)


def run(
    preset: Annotated[str, typer.Option(help="laptop: minutes on two cores. paper: in full, for a GPU.")] = "laptop",
    parts: Annotated[str, typer.Option(help="Of mechanism (nothing learned), recall and crowding.")] = ",".join(PARTS),
    models: Annotated[str, typer.Option(help="To train, by name.")] = ",".join(UPDATES),
    seeds: Annotated[int, typer.Option(help="How many, from 0; those of a model train side by side.")] = 3,
    overlap: Annotated[float, typer.Option(help="Of the two addresses of the mechanism.")] = report.OVERLAP,
    steps: Annotated[int | None, typer.Option(help="Of training; as the preset says if absent.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step; as the preset says if absent.")] = None,
    tests: Annotated[int | None, typer.Option(help="Sequences a test; as the preset says if absent.")] = None,
    queries: Annotated[str, typer.Option(help="read alone, or write first, as other tokens do.")] = "read",
    jobs: options.Jobs = 1,
    device: options.Device = None,
    output: Annotated[Path, typer.Option(help="For numbers and pictures; what it holds is not run again.")] = Path(
        "runs/collision"
    ),
) -> None:
    """Collisions of addresses (section 4.1 of Memory by Design): mechanism, learned recall, crowding."""
    wanted = options.names("parts", parts, PARTS)
    named = options.names("models", models, tuple(UPDATES))
    every = range(options.count("seeds", seeds))
    if not 0 <= overlap < 1:
        raise ArgumentError("overlap", got=overlap, needs="at least 0 and below 1")
    changes = {"steps": steps, "batch": batch, "tests": tests, "queries": queries}
    told = {name: value for name, value in changes.items() if value is not None}
    protocol = replace(options.preset(preset, PRESETS), **told)
    where = options.device(device)
    console = Console(highlight=False)
    output.mkdir(parents=True, exist_ok=True)
    written = report.mechanism(Setting(), overlap, output, console) if "mechanism" in wanted else []
    results = Results(output / "results.jsonl")
    cells = [
        Cell(part, model, seed, protocol) for part in wanted if part in STUDIES for model in named for seed in every
    ]
    with progress(console) as follow:
        rows = run_cells(cells, results, where, jobs=options.count("jobs", jobs), follow=follow)
    written += report.learned(list(rows.values()), output, console)
    for path in written:
        console.print(f"  {path}", soft_wrap=True)
