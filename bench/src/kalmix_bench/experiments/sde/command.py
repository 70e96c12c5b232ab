"""`kalmix bench sde`: predicting linear stochastic differential equations, beside who knows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix_bench.datasets.sde.settings import SETTINGS
from kalmix_bench.experiments.sde import PRESETS, REFERENCES, Cell, Results, report
from kalmix_bench.experiments.sde import run as run_cells
from kalmix_bench.experiments.sde.models import MODELS
from kalmix_bench.runner import options
from kalmix_bench.runner.progress import progress


def run(
    preset: Annotated[str, typer.Option(help="laptop: a minute a model and seed. paper: in full.")] = "laptop",
    settings: Annotated[str, typer.Option(help="Noises and samplings, by name.")] = ",".join(SETTINGS),
    models: Annotated[str, typer.Option(help="To train, by name.")] = ",".join(MODELS),
    seeds: options.Seeds = 1,
    epochs: Annotated[int | None, typer.Option(help="Of training; as the preset says if absent.")] = None,
    jobs: options.Jobs = 1,
    device: options.Device = None,
    output: Annotated[Path, typer.Option(help="For numbers and pictures; what it holds is not run again.")] = Path(
        "runs/sde"
    ),
) -> None:
    """Linear SDEs (section 4.3 of Adaptive Filter Attention): the next measurement, learned and at best."""
    wanted = options.names("settings", settings, tuple(SETTINGS))
    named = options.names("models", models, tuple(MODELS))
    protocol = options.preset(preset, PRESETS)
    protocol = protocol if epochs is None else replace(protocol, epochs=epochs)
    every = range(options.count("seeds", seeds))
    where, console, results = options.device(device), Console(highlight=False), Results(output / "results.jsonl")
    report.unlearned(wanted, console)
    cells = [
        Cell(setting, model, seed, protocol) for setting in wanted for model in (REFERENCES, *named) for seed in every
    ]
    with progress(console) as follow:
        rows = run_cells(cells, results, where, jobs=options.count("jobs", jobs), follow=follow)
    written = [*report.tell(list(rows.values()), output, console), *report.pictures(rows, results, output)]
    for path in (results.path, *written):
        console.print(f"  {path}", soft_wrap=True)
