"""Experiment on solvers of a ridge regression: convergence, gradients, and bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kalmix_bench.experiments.solvers.protocol import PRESETS, STUDIES, SolverCell
from kalmix_bench.runner import options, session
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.experiment import Experiment, ProgressFn
from kalmix_bench.runner.paper_claims import Finding


class Solvers(Experiment[SolverCell]):
    """Experiment with the numerical studies of Gated KalmaNet's solvers."""

    name = "solvers"
    keys = frozenset(("study", "setting"))
    latest = ("study", "setting")

    def commands(self) -> dict[str, Callable[..., None]]:
        return {"solvers": _command}

    def run(
        self, cells: tuple[SolverCell, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> list[Row]:
        (cell,) = cells
        return [{"found": STUDIES[cell.study](cell.setting, cell.seed, device, on_progress)}]

    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        from kalmix_bench.experiments.solvers import report

        return report.write_report(rows, output, console)

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        from kalmix_bench.experiments.solvers import report

        return report.findings(rows)


def _command(
    preset: Annotated[str, typer.Option(help="laptop: minutes on two cores. paper: full size, for a GPU.")] = "laptop",
    study: Annotated[str, typer.Option(help="Studies to run, separated by commas.")] = ",".join(STUDIES),
    seeds: options.Seeds = 1,
    jobs: options.Jobs = 1,
    device: options.Device = None,
    commit: options.Commit = None,
    output: Annotated[Path, typer.Option(help="Output folder; finished cells in it are skipped.")] = Path(
        "runs/solvers"
    ),
) -> None:
    """Run studies of ridge solvers (Figures 1, 5 and 9 of Gated KalmaNet): residuals, gradients, condition numbers."""
    study_names = options.names("study", study, tuple(STUDIES))
    settings, seed_range = options.preset(preset, PRESETS), range(options.count("seeds", seeds))
    torch_device, console = options.device(device), Console(highlight=False)
    cells = [SolverCell(name, settings[name], seed) for name in study_names for seed in seed_range]
    session.run(Solvers(commit), cells, output, console, device=torch_device, jobs=jobs)
