"""Experiment on overlapping keys: a deterministic mechanism without learning, and trained models."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.collision.mechanism import MechanismSetting
from kalmix_bench.experiments.collision.models import PAPER, UPDATES, RecallModel
from kalmix_bench.experiments.collision.protocol import OVERLAP, PRESETS, STUDIES, CollisionCell
from kalmix_bench.experiments.collision.trainer import condition_values, evaluate, train
from kalmix_bench.runner import options, session
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.experiment import Experiment, ProgressFn
from kalmix_bench.runner.paper_claims import Finding

PARTS = ("mechanism", *STUDIES)


class Collision(Experiment[CollisionCell]):
    """Experiment on learned recall with overlapping keys (appendix E.5); the seeds of a model train in one batch."""

    name = "collision"
    keys = frozenset(("study", "model"))
    latest = ("study", "protocol")

    def commands(self) -> dict[str, Callable[..., None]]:
        return {"collision": _command}

    def group_key(self, cell: CollisionCell) -> Hashable:
        return cell.study, cell.model, cell.protocol

    def run(
        self, cells: tuple[CollisionCell, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> list[Row]:
        """Train and test models that differ only in their seeds.

        Raises:
            NonFiniteError: a loss diverged.
        """
        study, model, protocol = cells[0].study, cells[0].model, cells[0].protocol
        seeds = [cell.seed for cell in cells]
        study_spec, writing = STUDIES[study], protocol.queries == "write"
        recaller = RecallModel(model, study_spec.task.inputs, study_spec.task.labels, seeds, queries_write=writing).to(
            device
        )
        loss = train(
            recaller, study_spec, seeds, protocol, device, lambda done, loss: on_progress(done, f"loss {loss:.3f}")
        )
        scores = [
            (condition_values(at), evaluate(recaller, study_spec, at, protocol, device))
            for at in study_spec.test_conditions
        ]
        return [
            {
                "members": len(seeds),
                "loss": float(loss[member]),
                "scores": [at | {name: float(score[member]) for name, score in of.items()} for at, of in scores],
            }
            for member in range(len(seeds))
        ]

    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        from kalmix_bench.experiments.collision import report

        return report.write_report(rows, output, console)

    def report_run(
        self, rows: Mapping[CollisionCell, Row], results: Results, output: Path, console: Console
    ) -> list[Path]:
        from kalmix_bench.experiments.collision import report

        return report.learned(list(rows.values()), output, console)

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        from kalmix_bench.experiments.collision import report

        return report.findings(rows)


def _command(
    preset: Annotated[str, typer.Option(help="laptop: minutes on two cores. paper: full size, for a GPU.")] = "laptop",
    parts: Annotated[str, typer.Option(help="Parts to run: mechanism (no learning), recall, crowding.")] = ",".join(
        PARTS
    ),
    models: Annotated[
        str,
        typer.Option(
            help="Models to train, by name. Also: bayesian-decay-per-key, bayesian-decay-per-head (learned decays)."
        ),
    ] = ",".join(PAPER),
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 0; a model's seeds train together.")] = 3,
    overlap: Annotated[float, typer.Option(help="Overlap of the mechanism's two addresses.")] = OVERLAP,
    steps: Annotated[int | None, typer.Option(help="Training steps. Default: the preset's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step. Default: the preset's.")] = None,
    test_sequences: Annotated[int | None, typer.Option(help="Sequences per test. Default: the preset's.")] = None,
    queries: Annotated[
        str, typer.Option(help="read: queries only read. write: they also write, as other tokens do.")
    ] = "read",
    jobs: options.Jobs = 1,
    device: options.Device = None,
    commit: options.Commit = None,
    output: Annotated[Path, typer.Option(help="Output folder; finished cells in it are skipped.")] = Path(
        "runs/collision"
    ),
) -> None:
    """Run the collision experiments (section 4.1 of Memory by Design): mechanism, learned recall and crowding."""
    from kalmix_bench.experiments.collision import report

    part_names = options.names("parts", parts, PARTS)
    model_names = options.names("models", models, tuple(UPDATES))
    seed_range = range(options.count("seeds", seeds))
    if not 0 <= overlap < 1:
        raise ArgumentError("overlap", got=overlap, expected="at least 0 and below 1")
    changes = {"steps": steps, "batch_size": batch_size, "test_sequences": test_sequences, "queries": queries}
    overrides = {name: value for name, value in changes.items() if value is not None}
    protocol = replace(options.preset(preset, PRESETS), **overrides)
    torch_device = options.device(device)
    console = Console(highlight=False)
    output.mkdir(parents=True, exist_ok=True)
    files = report.mechanism(MechanismSetting(), overlap, output, console) if "mechanism" in part_names else []
    cells = [
        CollisionCell(part, model, seed, protocol)
        for part in part_names
        if part in STUDIES
        for model in model_names
        for seed in seed_range
    ]
    session.run(Collision(commit), cells, output, console, device=torch_device, jobs=jobs, files=files)
