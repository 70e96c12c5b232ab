"""Experiment that trains predictors of linear SDEs and compares them with filters that know the system."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
import typer
from rich.console import Console

from kalmix.files import replace_file
from kalmix_bench.datasets.sde.scores import squared_errors
from kalmix_bench.datasets.sde.settings import SETTINGS
from kalmix_bench.experiments.sde.checkpoints import weights
from kalmix_bench.experiments.sde.models import MODELS
from kalmix_bench.experiments.sde.protocol import PRESETS, REFERENCES, SdeCell
from kalmix_bench.experiments.sde.trainer import train_predictor
from kalmix_bench.runner import options, session
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.experiment import Experiment, ProgressFn
from kalmix_bench.runner.paper_claims import Finding


class Sde(Experiment[SdeCell]):
    """Experiment on linear stochastic differential equations (section 4.3 of Adaptive Filter Attention)."""

    name = "sde"
    keys = frozenset(("setting", "model"))
    latest = ("setting", "protocol")
    # The full laptop preset takes as long as all other experiments together.
    laptop: ClassVar = {"settings": "figure-1b", "models": "afa,softmax", "epochs": 60}

    def commands(self) -> dict[str, Callable[..., None]]:
        return {"sde": _command}

    def run(
        self, cells: tuple[SdeCell, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> list[Row]:
        """Train a model, store its weights, and return its errors on the test trajectories.

        Raises:
            NonFiniteError: the loss diverged.
        """
        (cell,) = cells
        setting, protocol = SETTINGS[cell.setting], cell.protocol
        data = setting.draw(protocol.sizes, cell.seed)
        if cell.model == REFERENCES:
            reference_errors = setting.references(data.test)
            on_progress(1.0, _error(reference_errors["last"]["measurement"]))
            return [{"errors": reference_errors}]
        predictor = train_predictor(
            cell.model, data, protocol, cell.seed, device, lambda done, error: on_progress(done, _error(error))
        )
        with replace_file(weights(cell, results)) as partial_file:
            torch.save(predictor.snapshots, partial_file)
        errors = squared_errors(predictor.predict(data.test, protocol.batch_size), data.test)
        return [{"errors": {cell.model: errors}, "validation": predictor.validation}]

    def is_complete(self, cell: SdeCell, results: Results) -> bool:
        return cell.model == REFERENCES or weights(cell, results).exists()

    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        from kalmix_bench.experiments.sde import report

        return report.write_report(rows, output, console)

    def report_run(self, rows: Mapping[SdeCell, Row], results: Results, output: Path, console: Console) -> list[Path]:
        from kalmix_bench.experiments.sde import report

        return [*super().report_run(rows, results, output, console), *report.pictures(rows, results, output)]

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        from kalmix_bench.experiments.sde import report

        return report.findings(rows)


def _command(
    preset: Annotated[str, typer.Option(help="laptop: a minute per model and seed. paper: full size.")] = "laptop",
    settings: Annotated[str, typer.Option(help="Settings (noises and samplings), by name.")] = ",".join(SETTINGS),
    models: Annotated[str, typer.Option(help="Models to train, by name.")] = ",".join(MODELS),
    seeds: options.Seeds = 1,
    epochs: Annotated[int | None, typer.Option(help="Training epochs. Default: the preset's.")] = None,
    jobs: options.Jobs = 1,
    device: options.Device = None,
    commit: options.Commit = None,
    output: Annotated[Path, typer.Option(help="Output folder; finished cells in it are skipped.")] = Path("runs/sde"),
) -> None:
    """Train predictors of linear SDEs (section 4.3 of Adaptive Filter Attention); compare with Kalman filters."""
    from kalmix_bench.experiments.sde import report

    setting_names = options.names("settings", settings, tuple(SETTINGS))
    model_names = options.names("models", models, tuple(MODELS))
    protocol = options.preset(preset, PRESETS)
    protocol = protocol if epochs is None else replace(protocol, epochs=epochs)
    seed_range = range(options.count("seeds", seeds))
    torch_device, console = options.device(device), Console(highlight=False)
    report.report_untrained(setting_names, console)
    cells = [
        SdeCell(setting, model, seed, protocol)
        for setting in setting_names
        for model in (REFERENCES, *model_names)
        for seed in seed_range
    ]
    session.run(Sde(commit), cells, output, console, device=torch_device, jobs=jobs)


def _error(value: float) -> str:
    return f"error {value:.4g}"
