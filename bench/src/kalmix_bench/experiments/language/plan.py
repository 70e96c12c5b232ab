"""Plan of a comparison: parameters, tokens and an estimated time of each layer, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.language.architectures import compress, describe, make_blocks
from kalmix_bench.experiments.language.protocol import LanguageCell, speed
from kalmix_bench.runner.cells import Row

GPU, MFU = "H200", 0.15  # of estimated times


def flops_of(cell: LanguageCell) -> float:
    """Return the FLOPs of a run."""
    flops = cell.estimate().flops
    assert flops is not None
    return flops


def plan_table(
    cells: Sequence[LanguageCell], corpus_tokens: int | None, gpu: str, mfu: float, rows: Iterable[Row] = ()
) -> Table:
    """Return the table of a plan, a row per layer and stage.

    Args:
        cells: the runs.
        corpus_tokens: training tokens of the corpus; `None` if it is not there.
        gpu: name of the GPU.
        mfu: assumed fraction of its peak.
        rows: finished rows; the rate of a layer on this GPU replaces the assumed one.
    """
    from kalmix.training.estimates import peak_flops  # imports transformers

    peak = peak_flops(gpu, bf16=True)
    if peak is None:
        raise ArgumentError("gpu", got=repr(gpu), expected="a GPU whose peak is known, such as 'H200'")
    here = [row for row in rows if gpu.upper() in row["device"].upper()]
    measured = {row["language"]: rate for row in here if (rate := speed(row, "mfu"))}
    title = f"[bold]plan[/] for one {gpu}, at an MFU of {mfu:g} where none has been measured"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("stage", "layer", "blocks"):
        table.add_column(column, no_wrap=True)
    for column in ("parameters", "cells", "tokens", "epochs", "TFLOP", "MFU", "seconds a cell"):
        table.add_column(column, justify="right", no_wrap=True)
    total = 0.0
    for stage, layer in dict.fromkeys((cell.stage, cell.layer) for cell in cells):
        group = [cell for cell in cells if (cell.stage, cell.layer) == (stage, layer)]
        size, flops, rate = group[0].size, flops_of(group[0]), measured.get(layer, mfu)
        seconds = flops / (peak * rate)
        total += seconds * len(group)
        table.add_row(
            stage,
            layer,
            describe(compress(make_blocks(layer, size.model))),
            f"{group[0].estimate().parameters:,}",
            str(len(group)),
            f"{size.tokens / 1e6:g}M",
            f"{size.tokens / corpus_tokens:.2f}" if corpus_tokens else "",
            f"{flops / 1e12:,.0f}",
            f"{rate:.3f}",
            f"{seconds:,.0f}",
        )
    table.caption = (
        f"{len(cells)} cells, {total / 3600:.2f} GPU-hours of training, without start, compilation and tests"
    )
    return table
