"""Command `kalmix bench perf decode`: time tokens that whole models generate, one process a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from kalmix.errors import ArgumentError
from kalmix_bench.perf.decode import report
from kalmix_bench.perf.decode.protocol import CACHES, MODELS, DecodeCell, make_cells
from kalmix_bench.perf.model_rows import Hardware, ModelRows, deadline_after, measure_rows, report_rows
from kalmix_bench.perf.models.protocol import PEERS, PRESETS
from kalmix_bench.runner import options
from kalmix_bench.runner.cells import Results, Row

LEAST_TOKENS = 8
PROMPTS = {"paper": ("1,64", "512,8192"), "laptop": ("1,2", "16,64")}  # batches and prompts of a preset


class Decode(ModelRows[DecodeCell]):
    """Tokens that whole models generate, next to models of other libraries."""

    name = "generated tokens"

    def commands(self) -> dict[str, Callable[..., None]]:
        return {"decode": run}

    def measure(self, cell: DecodeCell, device: torch.device, on_prepared: Callable[[], None]) -> Row:
        from kalmix_bench.perf.decode.measure import measure_row

        return measure_row(cell, device, on_prepared, self.limit)

    def summary(self, row: Row) -> str:
        return report.summary(row)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        return report.tables(rows)

    def shown(self, rows: Sequence[Row]) -> list[Row]:
        return report.latest(rows)


def run(
    rows: Annotated[str, typer.Option(help="Models, separated by commas. Default: all, and those of --peers.")] = "",
    caches: Annotated[
        str,
        typer.Option(
            help="dynamic, static (compiled by transformers on a GPU) and captured (steps in a CUDA graph; layers of "
            "kalmix only), separated by commas. Default: all; without a GPU, all but captured."
        ),
    ] = "",
    peers: Annotated[bool, typer.Option(help="Add the models of flash-linear-attention and transformers.")] = True,
    preset: Annotated[str, typer.Option(help="paper: 340 to 420 million parameters. laptop: for a CPU.")] = "laptop",
    batches: Annotated[str, typer.Option(help="Numbers of prompts. Default: 1,64 with the preset paper.")] = "",
    prompts: Annotated[str, typer.Option(help="Tokens of a prompt. Default: 512,8192 with the preset paper.")] = "",
    tokens: Annotated[int, typer.Option(help="New tokens of each prompt.")] = 32,
    devices: Annotated[
        str | None,
        typer.Option(help="all (GPUs), cpu, or some GPUs, such as 0,1. Default: one GPU, or cpu without GPUs."),
    ] = None,
    jobs_per_device: Annotated[
        int, typer.Option(help="Processes per device. They compile side by side; tokens are timed alone.")
    ] = 1,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which the command ends. Default: none.")] = None,
    row_limit: Annotated[float, typer.Option(help="Seconds after which a row is given up.")] = 300.0,
    prepare_only: Annotated[
        bool, typer.Option("--prepare", help="Fill the caches of compilers; time and write no rows.")
    ] = False,
    report_only: Annotated[bool, typer.Option("--report", help="Report the rows in --output; run nothing.")] = False,
    output: Annotated[
        Path, typer.Option(help="Output folder; rows in it of this commit, size and hardware are not run again.")
    ] = Path("runs/decode"),
) -> None:
    """Time the tokens that a model of each layer generates, next to models of other libraries.

    Prints tables and writes them to report.md. Exit status: 0 if all rows are
    there, 3 if the deadline came first.
    """
    end, results = deadline_after(deadline), Results(output / "results.jsonl")
    if report_only:
        report_rows(Decode(), None, results)
        return
    size, (default_batches, default_prompts) = options.preset(preset, PRESETS), PROMPTS[preset]
    batch_sizes = options.counts("batches", batches or default_batches)
    lengths = options.counts("prompts", prompts or default_prompts)
    sizes = [replace(size, batch_size=batch, seq_len=length) for batch in batch_sizes for length in lengths]
    names = options.names("rows", rows or ",".join(x for x in MODELS if peers or x not in PEERS), MODELS)
    hardware = Hardware.of(devices, options.count("jobs-per-device", jobs_per_device))
    usable = [x for x in CACHES if x != "captured" or hardware.device.type == "cuda"]
    modes = options.names("caches", caches or ",".join(usable), CACHES)
    if tokens < LEAST_TOKENS:
        raise ArgumentError("tokens", got=tokens, expected=f"at least {LEAST_TOKENS}")
    cells = make_cells(names, modes, sizes, (tokens, hardware.name, hardware.commit))
    limit, processes = options.positive("row-limit", row_limit), len(hardware.gpus)
    experiment = Decode(limit, processes, prepare_only=prepare_only)
    measure_rows(experiment, cells, results, hardware, end)
    if not prepare_only:
        report_rows(experiment, cells, results)
