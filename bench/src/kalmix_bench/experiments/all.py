"""`kalmix bench all`: every experiment and benchmark, one after the other, each into a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.rule import Rule

from kalmix_bench.experiments.collision import command as collision
from kalmix_bench.experiments.recall import command as benchmark
from kalmix_bench.experiments.recall.presets import BENCHES
from kalmix_bench.experiments.sde import command as sde
from kalmix_bench.experiments.solvers import command as solvers
from kalmix_bench.runner import options
from kalmix_bench.runner import report as bench_report

COMMANDS: dict[str, Callable[..., None]] = {
    **{name: benchmark.command(name) for name in BENCHES},
    "collision": collision.run,
    "solvers": solvers.run,
    "sde": sde.run,
}
# What a laptop leaves out: these take as long as all others together, and say more of the machine than of the layers.
LAPTOP: dict[str, dict[str, Any]] = {"sde": {"settings": "figure-1b", "models": "afa,softmax", "epochs": 60}}


def run(
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
    console = Console(highlight=False)
    for name, command in COMMANDS.items():
        console.print(Rule(name, align="left"))
        less = LAPTOP.get(name, {}) if preset == "laptop" else {}
        command(preset=preset, seeds=seeds, jobs=jobs, device=device, output=output / name, **less)
    console.print(Rule("report", align="left"))
    bench_report.run([output / name for name in COMMANDS], output)
