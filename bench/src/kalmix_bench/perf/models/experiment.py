"""Command `kalmix bench perf models`: time training steps of whole models, one process a row."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kalmix.errors import ArgumentError
from kalmix.files import FORMAT
from kalmix.training.provenance import provenance
from kalmix_bench.perf.models import report
from kalmix_bench.perf.models.protocol import MODELS, MODES, PEERS, PRESETS, SIZES, ModelCell
from kalmix_bench.runner import markdown_console, options, scheduler
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.experiment import CellStopped, Experiment, ProgressFn
from kalmix_bench.runner.markdown_console import RecordingConsole
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.progress import progress
from kalmix_bench.runner.workers import WorkerConfig

MEASURING = 12.0  # seconds before the deadline at which the last row may begin its timed steps
ENDING = 4.0  # seconds before the deadline at which processes are terminated
UNFINISHED = 3  # exit status
RETRIED = "not installed"  # status of rows that run again


class Models(Experiment[ModelCell]):
    """Training steps of whole models, next to models of other libraries.

    Args:
        limit: seconds after which a row is given up.
        processes: number of processes that take first steps side by side.
    """

    name = "training steps"
    keys = frozenset(("model", "mode", "size", "status"))
    in_all = False

    def __init__(self, limit: float = math.inf, processes: int = 1) -> None:
        self.limit, self.processes = limit, processes

    def commands(self) -> dict[str, Callable[..., None]]:
        return {"models": run}

    def run(
        self, cells: tuple[ModelCell, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> list[Row]:
        from kalmix_bench.perf.models.measure import measure_row

        def prepared() -> None:
            if on_progress(0.5, "first step done"):
                raise CellStopped

        (cell,) = cells
        row = measure_row(cell, device, prepared, self.limit)
        on_progress(0.99, report.summary(row))
        return [{"commit": cell.commit, "processes": self.processes, **row}]

    def is_complete(self, cell: ModelCell, results: Results) -> bool:
        return results.rows([cell])[cell]["status"] != RETRIED

    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        recorder = RecordingConsole(console)
        for table in report.tables(rows):
            recorder.print(table)
        return [markdown_console.write({self.name: recorder.tables}, output / "report.md")]

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        return []


Size = Annotated[int | None, typer.Option(help="In place of the preset's.")]


def run(
    rows: Annotated[str, typer.Option(help="Models, separated by commas. Default: all, and those of --peers.")] = "",
    modes: Annotated[str, typer.Option(help="eager, compiled, or both, separated by a comma.")] = ",".join(MODES),
    peers: Annotated[bool, typer.Option(help="Add the models of flash-linear-attention and transformers.")] = True,
    preset: Annotated[str, typer.Option(help="paper: 340 to 420 million parameters. laptop: for a CPU.")] = "laptop",
    layers: Size = None,
    hidden_size: Size = None,
    batch_size: Size = None,
    seq_len: Size = None,
    vocab_size: Size = None,
    dtype: Annotated[str | None, typer.Option(help="Of autocast: bfloat16, float16, or float32 for none.")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps, after one that compiles and three more.")] = 10,
    devices: Annotated[
        str | None,
        typer.Option(help="all (GPUs), cpu, or some GPUs, such as 0,1. Default: one GPU, or cpu without GPUs."),
    ] = None,
    jobs_per_device: Annotated[
        int, typer.Option(help="Processes per device. They take first steps side by side; the others alone.")
    ] = 1,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which the command ends. Default: none.")] = None,
    row_limit: Annotated[float, typer.Option(help="Seconds after which a row is given up.")] = 300.0,
    report_only: Annotated[bool, typer.Option("--report", help="Report the rows in --output; run nothing.")] = False,
    output: Annotated[
        Path, typer.Option(help="Output folder; rows in it of this commit, size and hardware are not run again.")
    ] = Path("runs/models"),
) -> None:
    """Time training steps of a model of each layer, eager and compiled, next to models of other libraries.

    Prints a table and writes it to report.md. Exit status: 0 if all rows are
    there, 3 if the deadline came first, 1 if values of a row did not stay finite.
    """
    end = time.monotonic() + (math.inf if deadline is None else options.positive("deadline", deadline))
    console, results = Console(highlight=False), Results(output / "results.jsonl")
    if not report_only:
        given = dict(zip((*SIZES, "dtype"), (layers, hidden_size, batch_size, seq_len, vocab_size, dtype), strict=True))
        size = replace(options.preset(preset, PRESETS), **{name: x for name, x in given.items() if x is not None})
        names = options.names("rows", rows or ",".join(x for x in MODELS if peers or x not in PEERS), MODELS)
        mode_names = options.names("modes", modes, MODES)
        gpus = options.gpus(devices)[: None if devices else 1]
        torch_device = torch.device("cuda" if any(gpus) else "cpu")
        hardware = torch.cuda.get_device_name() if any(gpus) else f"{platform.machine()} cpu"
        origin = (options.count("steps", steps), hardware, provenance(torch_device)["commit"])
        cells = [ModelCell(name, mode, size, *origin) for mode in mode_names for name in names]
        workers = gpus * options.count("jobs-per-device", jobs_per_device)
        experiment = Models(options.positive("row-limit", row_limit), len(workers))
        worker_config = WorkerConfig(workers, end - MEASURING, end - ENDING, failures={}, one_batch=True)
        output.mkdir(parents=True, exist_ok=True)
        with progress(console) as progress_factory:
            scheduler.run(
                experiment, cells, results, torch_device, progress_factory=progress_factory, worker_config=worker_config
            )
        results.add(_row_of_failure(cell, reason) for cell, reason in (worker_config.failures or {}).items())
    found = report.latest(Models().select(results.read()))
    if report_only and not found:
        raise ArgumentError("output", got=repr(str(output)), expected="an output folder of this command")
    for path in (results.path, *Models().report(found, output, console)):
        console.print(f"  {path}", soft_wrap=True)
    if not report_only and (missing := len(cells) - len(results.rows(cells))):
        message = f"{missing} of {len(cells)} rows are missing; the same command continues with them"
        console.print(message, soft_wrap=True)
        raise typer.Exit(UNFINISHED)
    if not all(row.get("finite", True) for row in found):
        raise typer.Exit(1)


def _row_of_failure(cell: ModelCell, reason: str) -> Row:
    """Return the row of a cell whose process died."""
    origin = {"seconds": 0.0, "format": FORMAT, "peak_memory": None, **provenance(torch.device("cpu"))}
    return {
        **cell.to_dict(),
        **origin,
        "device": cell.hardware,
        "commit": cell.commit,
        "status": "failed",
        "reason": reason,
    }
