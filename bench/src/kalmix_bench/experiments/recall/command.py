"""`kalmix bench mad`, `mqar` and `a5`: layers on the papers' synthetic benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix_bench.experiments.recall import presets
from kalmix_bench.experiments.recall import run as run_cells
from kalmix_bench.runner import options, report
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.progress import progress

HELP = {
    "mad": "The six tasks of MAD, and long-context recall, by the protocol of Kalman Linear Attention.",
    "mqar": "Multi-query associative recall: Zoology's, and those with one vocabulary of Memory by Design.",
    "needle": "RULER's needles in a haystack, learned from bytes at one length and asked at others.",
    "a5": "The word problem of the group A5: what a layer can keep track of.",
}

LAYER = """Layer to run, by name, or with options: 'kla:{"slots": 8}'. Repeatable. Default: the preset's layers."""
VALIDATION = "Validation rows to draw in addition; they choose the epoch. Default: test rows do, as in the papers."


def command(bench: str) -> Callable[..., None]:
    """The command of a benchmark."""

    def run(
        preset: Annotated[
            str, typer.Option(help="laptop: minutes on two cores. paper: in full, for a GPU.")
        ] = "laptop",
        layer: Annotated[list[str] | None, typer.Option(help=LAYER)] = None,
        task: Annotated[list[str] | None, typer.Option(help="By name, once a task; all if absent.")] = None,
        width: Annotated[list[int] | None, typer.Option(help="Of models, once a width; all if absent.")] = None,
        depth: Annotated[str | None, typer.Option(help="Blocks of a model, such as 1,2,4; as the preset says.")] = None,
        seeds: options.Seeds = 1,
        epochs: Annotated[int | None, typer.Option(help="At most; as the preset says if absent.")] = None,
        validation: Annotated[int, typer.Option(help=VALIDATION)] = 0,
        jobs: options.Jobs = 1,
        device: options.Device = None,
        output: Annotated[Path | None, typer.Option(help="For results; what it holds is not run again.")] = None,
    ) -> None:
        studies = options.preset(preset, presets.BENCHES[bench])
        changes = {"validation": validation, **({} if epochs is None else {"epochs": epochs})}
        studies = tuple(replace(s, protocol=replace(s.protocol, **changes)) for s in studies)
        depths = () if depth is None else options.counts("depth", depth)
        cells = presets.cells(studies, task or (), layer or (), options.count("seeds", seeds), width or (), depths)
        where, console = options.device(device), Console(highlight=False)
        output = Path("runs") / bench if output is None else output
        results = Results(output / "results.jsonl")
        with progress(console) as follow:
            rows = run_cells(cells, results, where, jobs=options.count("jobs", jobs), follow=follow)
        written = report.write(list(rows.values()), output, console)
        for path in (results.path, *written):
            console.print(f"  {path}", soft_wrap=True)

    run.__doc__ = HELP[bench]
    return run
