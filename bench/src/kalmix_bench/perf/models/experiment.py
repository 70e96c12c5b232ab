"""Command `kalmix bench perf models`: time training steps of whole models, one process a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from kalmix_bench.perf.model_rows import Hardware, ModelRows, deadline_after, measure_rows, report_rows
from kalmix_bench.perf.models import report
from kalmix_bench.perf.models.protocol import MODELS, MODES, PEERS, PRESETS, SIZES, ModelCell
from kalmix_bench.runner import options
from kalmix_bench.runner.cells import Results, Row


class Models(ModelRows[ModelCell]):
    """Training steps of whole models, next to models of other libraries."""

    name = "training steps"

    def commands(self) -> dict[str, Callable[..., None]]:
        return {"models": run}

    def measure(self, cell: ModelCell, device: torch.device, on_prepared: Callable[[], None]) -> Row:
        from kalmix_bench.perf.models.measure import measure_row

        return measure_row(cell, device, on_prepared, self.limit)

    def summary(self, row: Row) -> str:
        return report.summary(row)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        return report.tables(rows)

    def shown(self, rows: Sequence[Row]) -> list[Row]:
        return report.latest(rows)


Size = Annotated[int | None, typer.Option(help="In place of the preset's.")]


def run(
    rows: Annotated[str, typer.Option(help="Models, separated by commas. Default: all, and those of --peers.")] = "",
    modes: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {text}" for name, text in MODES.items()) + ". Separated by commas.")
    ] = "eager,compiled",
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
    prepare_only: Annotated[
        bool, typer.Option("--prepare", help="Fill the caches of compilers; time and write no rows.")
    ] = False,
    report_only: Annotated[bool, typer.Option("--report", help="Report the rows in --output; run nothing.")] = False,
    output: Annotated[
        Path, typer.Option(help="Output folder; rows in it of this commit, size and hardware are not run again.")
    ] = Path("runs/models"),
) -> None:
    """Time training steps of a model of each layer, eager or compiled, next to models of other libraries.

    Prints a table and writes it to report.md. Exit status: 0 if all rows are
    there, 3 if the deadline came first, 1 if values of a row did not stay finite.
    """
    end, results = deadline_after(deadline), Results(output / "results.jsonl")
    if report_only:
        report_rows(Models(), None, results)
        return
    given = dict(zip((*SIZES, "dtype"), (layers, hidden_size, batch_size, seq_len, vocab_size, dtype), strict=True))
    size = replace(options.preset(preset, PRESETS), **{name: x for name, x in given.items() if x is not None})
    names = options.names("rows", rows or ",".join(x for x in MODELS if peers or x not in PEERS), MODELS)
    mode_names = options.names("modes", modes, MODES)
    hardware = Hardware.of(devices, options.count("jobs-per-device", jobs_per_device))
    origin = (options.count("steps", steps), hardware.name, hardware.commit)
    cells = [ModelCell(name, mode, size, *origin) for mode in mode_names for name in names]
    limit, processes = options.positive("row-limit", row_limit), len(hardware.gpus)
    experiment = Models(limit, processes, prepare_only=prepare_only)
    measure_rows(experiment, cells, results, hardware, end)
    if not prepare_only:
        report_rows(experiment, cells, results)
