"""Experiment that trains layers on the papers' synthetic tasks: `kalmix bench mad`, `mqar`, `needle` and `a5`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kalmix.errors import ArgumentError, NonFiniteError, any_of
from kalmix_bench import datasets
from kalmix_bench.experiments.recall import presets
from kalmix_bench.experiments.recall.layers import state_size
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.runner import cell_file, options, session
from kalmix_bench.runner import report as bench_report
from kalmix_bench.runner.cells import Results, Row, digest
from kalmix_bench.runner.determinism import deterministic_mode
from kalmix_bench.runner.experiment import Experiment, ProgressFn
from kalmix_bench.runner.paper_claims import Finding

HELP = {
    "mad": "Run MAD's six tasks and long-context recall with the protocol of Kalman Linear Attention.",
    "mqar": "Run multi-query associative recall: Zoology's tasks, and Memory by Design's with one vocabulary.",
    "needle": "Run RULER's needle tasks, trained on bytes at one length and tested at others.",
    "a5": "Run the word problem of the group A5, a test of state tracking.",
}

LAYER = """Layer to run, by name, or with options: 'kla:{"slots": 8}'. Repeatable. Default: the preset's layers."""
VALIDATION = "Validation rows to draw in addition; they choose the epoch. Default: test rows do, as in the papers."


class Recall(Experiment[RecallCell]):
    """Experiment that trains layers on the papers' synthetic tasks.

    Args:
        commit: commit of kalmix for the rows, where git does not know it.
        data: folder for rows of tasks, so that cells with equal rows draw them once.
        tf32: whether a GPU rounds float32 operands of matrix products to TF32, which is faster. Rows say so.
    """

    name = "benchmarks"
    keys = frozenset(("task", "layer"))

    def __init__(self, commit: str | None = None, data: Path | None = None, *, tf32: bool = False) -> None:
        super().__init__(commit)
        self.data: Path | None = data
        self.tf32: bool = tf32

    def commands(self) -> dict[str, Callable[..., None]]:
        return {bench: _command(bench) for bench in presets.BENCHES}

    def run(
        self, cells: tuple[RecallCell, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> list[Row]:
        """Train a layer on a task; return scores of the selected epoch, curves, sizes and speed.

        A run that takes minutes stores checkpoints and resumes from them. A run that diverges is finished: its row has
        `diverged` instead of scores. The final weights are stored next to the results.

        Raises:
            ArgumentError: the layer does not support the state size of the cell's shape.
        """
        from kalmix_bench.experiments.recall.checkpoints import save_weights
        from kalmix_bench.experiments.recall.data import draw_cell_data
        from kalmix_bench.experiments.recall.models import AutoEncoder, build
        from kalmix_bench.experiments.recall.trainer import train_cell

        (cell,), origin = cells, {"tf32": True} if self.tf32 and device.type == "cuda" else {}
        data, from_last = draw_cell_data(cell, self.data), datasets.get_task(cell.task).from_last
        length = data.parts[0].test.inputs.shape[1]
        with deterministic_mode(device, tf32=self.tf32):
            with torch.random.fork_rng():
                torch.manual_seed(cell.seed)
                model = build(data.vocab_size, cell.shape, cell.layer, length, from_last=from_last)
            mixer = (model.encoder if isinstance(model, AutoEncoder) else model).model.mixers[0]
            sizes = {
                "parameters": sum(x.numel() for x in model.parameters()),
                "layer_parameters": sum(x.numel() for x in mixer.parameters()),
                "state": state_size(mixer),
            }
            try:
                evaluation = train_cell(cell, data, model.to(device), device, on_progress, _checkpoints(cell, results))
            except NonFiniteError as error:
                on_progress(1.0, f"diverged ({error})")
                return [{**origin, **sizes, "diverged": str(error)}]
        save_weights(cell, model, results)
        epochs, tokens = len(evaluation.curves["loss"]), sum(part.train.inputs.size for part in data.parts)
        best_scores, on_test = (
            evaluation.slices[cell.protocol.select_epoch],
            evaluation.slices.get(f"{cell.protocol.select_epoch} on test"),
        )
        return [
            {
                **origin,
                **sizes,
                **({"fallbacks": evaluation.fallbacks} if evaluation.fallbacks else {}),
                "score": evaluation.main_score,
                "scores": evaluation.mean_scores(best_scores),
                **({} if on_test is None else {"test_chosen_scores": evaluation.mean_scores(on_test)}),
                "slices": evaluation.slices,
                "curves": {
                    name: [float(f"{value:.6g}") for value in curve] for name, curve in evaluation.curves.items()
                },
                "epochs": epochs,
                "training_seconds": round(evaluation.seconds["training"], 2),
                "evaluation_seconds": round(evaluation.seconds["evaluation"], 2),
                "compilation_seconds": round(evaluation.seconds.get("compilation", 0.0), 2),
                "tokens_per_second": round(epochs * tokens / max(evaluation.seconds["training"], 1e-9)),
            }
        ]

    def clear(self, cell: RecallCell, results: Results) -> None:
        shutil.rmtree(_checkpoints(cell, results), ignore_errors=True)

    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        from kalmix_bench.experiments.recall import report

        return report.write_report(rows, output, console)

    def report_run(
        self, rows: Mapping[RecallCell, Row], results: Results, output: Path, console: Console
    ) -> list[Path]:
        return bench_report.write(list(rows.values()), output, console, [self])

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        from kalmix_bench.experiments.recall import report

        return report.findings(rows)


def _checkpoints(cell: RecallCell, results: Results) -> Path:
    return results.path.parent / "checkpoints" / digest(cell)


def _check_tasks(bench: str, preset: str, tasks: Sequence[str]) -> None:
    """Check that the preset has the tasks that another preset of the benchmark has; the message names that one."""
    known = {
        other: {name for study in studies for name in (study.task, study.task.rpartition("/")[2])}
        for other, studies in presets.BENCHES[bench].items()
    }
    for name in tasks:
        others = [other for other in known if name in known[other]]
        if others and name not in known[preset]:
            raise ArgumentError("preset", problem=f"is {preset!r}, which has no task {name!r}", expected=any_of(others))


def _command(bench: str) -> Callable[..., None]:
    """Return the command of a benchmark."""

    def run(
        preset: Annotated[
            str,
            typer.Option(
                help="laptop: minutes on two cores. paper: full size, for a GPU. short: fewer rows or epochs. encoder: "
                "MAD without the MLP behind the block. mad-lab: MAD's own protocol."
            ),
        ] = "laptop",
        layer: Annotated[list[str] | None, typer.Option(help=LAYER)] = None,
        task: Annotated[list[str] | None, typer.Option(help="Task to run, by name; repeatable. Default: all.")] = None,
        hidden_size: Annotated[
            list[int] | None, typer.Option(help="Hidden size to run; repeatable. Default: the preset's sizes.")
        ] = None,
        depth: Annotated[
            str | None, typer.Option(help="Numbers of blocks, such as 1,2,4. Default: the preset's.")
        ] = None,
        seeds: options.Seeds = 1,
        epochs: Annotated[int | None, typer.Option(help="Largest number of epochs. Default: the preset's.")] = None,
        validation: Annotated[int, typer.Option(help=VALIDATION)] = 0,
        jobs: options.Jobs = 1,
        device: options.Device = None,
        output: Annotated[Path | None, typer.Option(help="Output folder; finished cells in it are skipped.")] = None,
        write: Annotated[
            Path | None, typer.Option(help="Write the cells to this file instead of running them.")
        ] = None,
    ) -> None:
        studies = options.preset(preset, presets.BENCHES[bench])
        changes = {"validation": validation, **({} if epochs is None else {"epochs": epochs})}
        studies = tuple(replace(s, protocol=replace(s.protocol, **changes)) for s in studies)
        depths = () if depth is None else options.counts("depth", depth)
        _check_tasks(bench, preset, task or ())
        cells = presets.make_cells(
            studies, task or (), layer or (), options.count("seeds", seeds), hidden_size or (), depths
        )
        console = Console(highlight=False)
        if write is not None:  # on any machine: cells have no device
            cell_file.write(cells, write)
            console.print(f"  {write}", soft_wrap=True)
            return
        output = Path("runs") / bench if output is None else output
        session.run(Recall(), cells, output, console, device=options.device(device), jobs=jobs)

    run.__doc__ = HELP[bench]
    return run
