"""Time training steps on one GPU and on all GPUs of a machine: DDP, FSDP2 and context parallelism.

    torchrun --nproc-per-node 4 -m kalmix_bench.perf.scaling.speed --output runs/scaling

Each row is a model and a method: tokens per second of all GPUs, milliseconds of a step and peak memory of a GPU. With
`one`, `ddp` and `fsdp2` each GPU has `--batch` sequences of `--length` tokens; `fsdp2 by 4` gathers the weights of four
blocks at once, and `fsdp2 by 4 kept` keeps them until the backward pass instead of gathering them twice. With
`context one` a GPU has one sequence of `--long` tokens; with `context` and `context two-phase` all GPUs divide it.

Methods of one GPU run first: each GPU has a model of its own, and all GPUs are timed at the same moment, so that no
other work disturbs them. One that runs out of memory is run again with activation checkpointing, and so are `ddp` and
`fsdp2` of its model, batch and length.

Each row is written when it ends, also if it failed. If some ranks fail while others wait for them, or if a row takes
longer than `--limit`, the program ends with status 1. Start it again to continue: rows in the output folder are not run
again, except those that the limit cut, if it is longer now. `--report` prints the table of a folder.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed

from kalmix.layers import MIXERS
from kalmix.training.provenance import provenance
from kalmix_bench.perf.scaling.group import (
    BEGUN,
    RESULTS,
    Ranks,
    check_names,
    end_process,
    has_ended,
    process_group,
    time_limit,
    too_long,
)
from kalmix_bench.perf.scaling.step import ALONE, METHODS, SIZES, Cell, Run, measure, profile_step, release, synchronize
from kalmix_bench.runner.json_lines import append_rows, read_rows

OUT_OF_MEMORY = "out of memory"
LIMIT, COMPILED_LIMIT = 300.0, 900.0  # seconds of a row of all GPUs; the first row of a model compiles its blocks


class Options(NamedTuple):
    """Options of the program beside its cells.

    Attributes:
        output: folder of rows.
        steps: timed steps of a row.
        profile: whether rows have the milliseconds of kernels.
        stop: time of `time.monotonic` after which no row begins.
        limit: seconds after which a row of all GPUs ends the program.
        commit: commit for the rows, where git is absent.
    """

    output: Path
    steps: int
    profile: bool
    stop: float
    limit: float
    commit: str | None


def cells_of(
    models: Sequence[str],
    methods: Sequence[str],
    batches: Sequence[int],
    length: int,
    long: int,
    compiled: bool,
    captured: bool = False,
) -> list[Cell]:
    """Return the cells in the order in which they run: smaller models first, then methods of one GPU, then others."""
    sizes = sorted({name.rsplit("-", 1)[1] for name in models}, key=list(SIZES).index)
    ordered = [*(x for x in methods if x in ALONE), *(x for x in methods if x not in ALONE)]
    found = []
    for size in sizes:
        for method in ordered:
            shapes = [(1, long)] if "context" in method else [(batch, length) for batch in batches]
            for batch, tokens in shapes:
                names = [name for name in models if name.endswith(f"-{size}")]
                found += [Cell(name, method, batch, tokens, compiled, captured=captured) for name in names]
    return found


def next_cell(cell: Cell, rows: Iterable[dict[str, Any]], begun: Iterable[dict[str, Any]], limit: float) -> Cell | None:
    """Return the cell as it must run now, with activation checkpointing if needed; `None` if its result is known."""
    rows = list(rows)
    own = [row for row in rows if _is_of(cell, row)]
    like = own if cell.is_context else [*own, *(x for x in rows if _is_of(cell._replace(method="one"), x))]
    cell = cell._replace(checkpointing=any(row["status"] == OUT_OF_MEMORY for row in like))
    if any((row["status"] != OUT_OF_MEMORY or row["checkpointing"]) and "limit" not in row for row in own):
        return None
    same = [row for row in own if row["checkpointing"] == cell.checkpointing]
    count = sum(_is_of(cell, row) and row["checkpointing"] == cell.checkpointing for row in begun)
    return None if has_ended(same, count, limit) else cell


def _is_of(cell: Cell, row: dict[str, Any]) -> bool:
    names = ("model", "method", "batch", "length", "compiled", "captured")
    return all(row.get(name, False) == getattr(cell, name) for name in names)  # older rows have no "captured"


def attempt(cell: Cell, ranks: Ranks, options: Options) -> dict[str, Any]:
    """Return the row of a cell on this rank; the ranks of a round must call this function together."""
    alone, waited, run = cell.method in ALONE, False, None

    def wait() -> None:
        nonlocal waited
        waited = True
        ranks.wait()

    def slowest(seconds: float) -> float:
        return seconds if alone else _largest(seconds, ranks.device)

    begin = time.monotonic()
    row = _begin_row(cell, ranks, options)
    try:
        with torch.cuda.stream(torch.cuda.Stream()) if cell.captured else nullcontext():
            run = Run(cell, ranks.device)
            row |= measure(run, options.steps, wait, slowest)
            if options.profile:
                row |= profile_step(run, alone or ranks.rank == 0)
        row["status"] = "ok"
    except torch.OutOfMemoryError:
        row["status"] = OUT_OF_MEMORY
    except Exception as error:  # one failure must not end the others
        row |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:500]}
    del run
    if cell.compiled:
        torch.compiler.reset()  # otherwise the limit of compilations of a function counts those of earlier rows
    release(ranks.device)
    if not waited:
        ranks.wait()
    return row | {"seconds": round(time.monotonic() - begin, 1)}


def _begin_row(cell: Cell, ranks: Ranks, options: Options) -> dict[str, Any]:
    return {**cell._asdict(), "gpus": 1 if cell.method in ALONE else ranks.world, "steps": options.steps}


def run_alone(cells: list[Cell], ranks: Ranks, options: Options, rows: list[dict[str, Any]]) -> None:
    """Run cells of one GPU, as many at a time as there are GPUs; append their rows to `rows`."""
    queue = cells
    while queue and time_is_left(ranks, options):
        now, queue = queue[: ranks.world], queue[ranks.world :]
        row = None
        if ranks.rank < len(now):
            row = attempt(now[ranks.rank], ranks, options)
        else:
            ranks.wait()
        broken = None
        try:
            synchronize(ranks.device)
        except RuntimeError as error:  # an error of the device, after which it cannot be used
            broken = str(error).split("\n")[0]
        found = [x for x in ranks.collect(row) if x is not None]
        rows += found
        for x in found if ranks.rank == 0 else ():
            _write(x, options, ranks)
        if any(ranks.collect(broken)):
            print(f"rank {ranks.rank}: a device failed ({broken}); start the program again to continue", flush=True)
            os._exit(1)
        again = [cell for cell in now if not cell.checkpointing and _ran_out(cell, found)]
        queue = [cell._replace(checkpointing=True) for cell in again] + queue


def _ran_out(cell: Cell, rows: list[dict[str, Any]]) -> bool:
    return any(_is_of(cell, row) and row["status"] == OUT_OF_MEMORY for row in rows)


def run_together(cell: Cell, ranks: Ranks, options: Options, rows: list[dict[str, Any]]) -> None:
    """Run a cell on all GPUs; append its row to `rows`.

    If some ranks fail and others do not, or if it takes longer than the limit, the program ends.
    """
    if ranks.rank == 0:
        append_rows(options.output / BEGUN, [cell._asdict()])

    def give_up() -> None:
        cut = {"status": "failed", "error": too_long(options.limit), "limit": options.limit}
        _write(_begin_row(cell, ranks, options) | cut, options, ranks)

    with time_limit(options.limit, ranks, give_up):
        found = ranks.collect(attempt(cell, ranks, options))
    failed = [row for row in found if row["status"] != "ok"]
    row = (failed or found)[0]
    rows.append(row)
    if ranks.rank == 0:
        _write(row, options, ranks)
    if failed and len(failed) < len(found):
        print(f"rank {ranks.rank}: {len(failed)} ranks failed; start the program again to continue", flush=True)
        os._exit(1)


def time_is_left(ranks: Ranks, options: Options) -> bool:
    """Return whether another row may begin; all ranks agree."""
    return ranks.from_first(time.monotonic() < options.stop)


def _largest(x: float, device: torch.device) -> float:
    value: Tensor = torch.tensor(x, dtype=torch.float64, device=device)
    distributed.all_reduce(value, distributed.ReduceOp.MAX)
    return float(value)


def _write(row: dict[str, Any], options: Options, ranks: Ranks) -> None:
    row = row | provenance(ranks.device, options.commit)
    append_rows(options.output / RESULTS, [row])
    print(_describe(row), flush=True)


def _describe(row: dict[str, Any]) -> str:
    name = f"{row['model']}, {row['method']}, {row['batch']} x {row['length']:,}"
    name += "".join(f", {x}" for x in ("compiled", "captured", "checkpointing") if row.get(x))
    if row["status"] != "ok":
        return f"{name}: {row['status']} {row.get('error', '')}".strip()
    gpu = f", computing {row['compute_ms']:.0f} and NCCL {row['nccl_ms']:.0f}" if "compute_ms" in row else ""
    gpu += f", idle {row['idle_ms']:.0f}, {row['kernels']} kernels" if "idle_ms" in row else ""
    first = f"first step {row['first_step_s']:.0f} s, " if "first_step_s" in row else ""
    took = f" ({first}{row['seconds']:.0f} s in all)" if "seconds" in row else ""
    return f"{name}: {row['tokens_per_s']:,.0f} tokens/s, {row['ms']:.1f} ms a step{gpu}{took}"


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table of rows, with ratios of tokens per second to one GPU."""
    shown = Table("model", "method", "sequences", "tokens/s", "ms a step", "computing", "NCCL", "peak GiB", "speedup")
    shown.add_column("efficiency")
    base = {(row["model"], row["method"], *_shape(row)): row for row in rows if row["status"] == "ok"}
    for row in rows:
        method = row["method"] + "".join(f" ({x})" for x in ("compiled", "captured", "checkpointing") if row.get(x))
        sequences = f"{row['batch']} x {row['length']:,}"
        if row["status"] != "ok":
            shown.add_row(row["model"], method, sequences, row["status"])
            continue
        one = base.get((row["model"], "context one" if "context" in method else "one", *_shape(row)))
        ratio = None if one is None or row["gpus"] == 1 else row["tokens_per_s"] / one["tokens_per_s"]
        shown.add_row(
            row["model"],
            method,
            sequences,
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ms']:.1f}",
            *(f"{row[x]:.0f}" if x in row else "" for x in ("compute_ms", "nccl_ms")),
            f"{row['peak_memory'] / 2**30:.1f}",
            "" if ratio is None else f"{ratio:.2f}",
            "" if ratio is None else f"{ratio / row['gpus']:.3f}",
        )
    return shown


def _shape(row: dict[str, Any]) -> tuple[int, int, bool, bool]:
    return row["batch"], row["length"], row["compiled"], row.get("captured", False)


def run_cells(cells: list[Cell], ranks: Ranks, options: Options) -> None:
    """Run the cells whose results are unknown, in order, until the deadline."""
    rows, begun = (ranks.read_rows(options.output / name) for name in (RESULTS, BEGUN))
    for alone, group in groupby(cells, lambda cell: cell.method in ALONE):
        if alone:
            pending = [x for x in (next_cell(cell, rows, begun, options.limit) for cell in group) if x is not None]
            run_alone(pending, ranks, options, rows)
            continue
        for cell in group:
            now = next_cell(cell, rows, begun, options.limit)
            if now is not None and time_is_left(ranks, options):
                run_together(now, ranks, options, rows)


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = "gated-deltanet-340m,kla-340m,bayesian-340m,hybrid-340m,gated-deltanet-1b,kla-1b"
    parser.add_argument("--models", default=models, help="models, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    parser.add_argument("--batch", default="4,1", help="sequences of a GPU; several numbers, separated by commas")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--long", type=int, default=65536, help="tokens of the sequence that ranks divide")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--compiled", action="store_true", help="compile each block with torch.compile")
    parser.add_argument("--captured", action="store_true", help="run the steps as one CUDA graph")
    parser.add_argument("--profile", action="store_true", help="record the kernels of one more step of each row")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which no row begins")
    limits = f"Default: {LIMIT:.0f}, or {COMPILED_LIMIT:.0f} with --compiled"
    parser.add_argument("--limit", type=float, help=f"seconds of a row of all GPUs; then the program ends. {limits}")
    parser.add_argument("--commit", help="commit for the rows, where git is absent")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling"), help="folder for results.jsonl")
    parser.add_argument("--report", action="store_true", help="print the table of the output folder; run nothing")
    arguments = parser.parse_args()
    names, methods = arguments.models.split(","), arguments.methods.split(",")
    check_names(parser, "--methods", methods, METHODS)
    check_names(parser, "--models", names, [f"{mixer}-{size}" for mixer in (*MIXERS, "hybrid") for size in SIZES])
    if arguments.captured and not torch.cuda.is_available():
        parser.error("--captured needs a GPU")
    if not all(x.isdecimal() and int(x) > 0 for x in arguments.batch.split(",")):
        parser.error(f"--batch is {arguments.batch!r}; expected positive integers, separated by commas")
    console = Console(width=150)
    if not arguments.report:
        batches = [int(x) for x in arguments.batch.split(",")]
        how = arguments.compiled, arguments.captured
        cells = cells_of(names, methods, batches, arguments.length, arguments.long, *how)
        stop = begin + arguments.deadline
        limit = COMPILED_LIMIT if arguments.compiled else LIMIT
        limit = limit if arguments.limit is None else arguments.limit
        options = Options(arguments.output, arguments.steps, arguments.profile, stop, limit, arguments.commit)
        with process_group(limit) as ranks:
            run_cells(cells, ranks, options)
            first = ranks.rank == 0
        if not first:
            return
    console.print(table(read_rows(arguments.output / RESULTS)))


if __name__ == "__main__":
    main()
    end_process(0)
