"""Command `kalmix bench beliefs`: posterior variances and attention maps of trained benchmark models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kalmix.errors import ArgumentError
from kalmix_bench.runner.options import count

if TYPE_CHECKING:
    from kalmix_bench.experiments.recall.protocol import RecallCell
    from kalmix_bench.runner.cells import Results

MAPS = 4  # channels or heads drawn per layer, as in Figures 11 to 13 of Kalman Linear Attention


def run(
    output: Annotated[Path, typer.Argument(help="Output folder of `kalmix bench mad`, mqar or a5.")],
    task: Annotated[list[str] | None, typer.Option(help="Task to draw; repeatable. Default: all.")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="Layer to draw; repeatable. Default: all.")] = None,
    row: Annotated[int, typer.Option(min=0, help="Index of the test row.")] = 0,
    models: Annotated[int, typer.Option(help="Largest number of models to draw.")] = 12,
) -> None:
    """Draw posterior variances along a test row, and Kalman attention maps, of every trained model that has a
    posterior.
    """
    from kalmix_bench.experiments.recall.checkpoints import cells_with_weights
    from kalmix_bench.experiments.recall.layers import layer_name
    from kalmix_bench.runner.cells import Results

    count("models", models)
    results, console = Results(output / "results.jsonl"), Console(highlight=False, soft_wrap=True)
    there = cells_with_weights(results)
    asked = [
        cell
        for cell in there
        if (not task or {cell.task, cell.task.rpartition("/")[2]} & set(task))
        and (not layer or cell.layer in map(layer_name, layer))
    ]
    if not asked:
        known = dict.fromkeys(f"{cell.layer} on {cell.task}" for cell in there)
        got = f"{str(output)!r}, which has {', '.join(known) or 'no trained model'}"
        raise ArgumentError("output", got=got, expected="a folder with a trained model of this task and layer")
    drawn = 0
    for cell in asked:
        if drawn < models:
            written = draw(cell, results, row)
            drawn += bool(written)
            for path in written:
                console.print(f"  {path}")
    if not drawn:
        got = f"{', '.join(sorted({cell.layer for cell in asked}))}, which has no posterior"
        raise ArgumentError("layer", got=got, expected="a layer with a posterior, such as kla")


def draw(cell: RecallCell, results: Results, row: int) -> list[Path]:
    """Draw a figure of variances, and one of attention maps for each layer; none for layers without a posterior."""
    import numpy as np
    import torch

    from kalmix.analysis.layer_diagnostics import diagnose_layers
    from kalmix.analysis.plots import channel_maps, posterior_variance
    from kalmix_bench.datasets.metrics import IGNORE_INDEX
    from kalmix_bench.experiments.recall.checkpoints import load_trained_model
    from kalmix_bench.experiments.recall.data import draw_cell_data
    from kalmix_bench.experiments.recall.models import AutoEncoder

    drawn = draw_cell_data(cell)
    test = drawn.parts[0].test
    if row >= len(test):
        raise ArgumentError("row", got=row, expected=f"below {len(test)} (test rows of {cell})")
    model = load_trained_model(cell, drawn, results)
    tagger = model.encoder if isinstance(model, AutoEncoder) else model
    _, layers = diagnose_layers(tagger.model.layers, tagger.embed(torch.from_numpy(test.inputs[row])), weights=True)
    if not layers:
        return []
    asked = test.targets[row] != IGNORE_INDEX
    named = np.isin(test.inputs[row], test.targets[row][asked])
    tokens, folder = [str(token) for token in test.inputs[row]], results.path.parent / "beliefs"
    name = re.sub(r"[^\w.]+", "-", f"{cell.task}-{cell.layer}-{cell.seed}")
    title = f"{cell.layer} on {cell.task}"
    variance = folder / f"{name}-variance.png"
    posterior_variance(
        variance,
        [layer.variance for layer in layers],
        tokens,
        [layer.name for layer in layers],
        marks={} if asked.all() else {"tokens with the answer": named, "queries": asked},
        title=f"Posterior variance: {title}",
    )
    written = [variance]
    for layer in layers:
        if layer.weights is not None:
            kind = "channel" if len(layer.weights) == layer.variance.shape[1] else "head"
            chosen = torch.randperm(len(layer.weights), generator=torch.Generator().manual_seed(0))[:MAPS].sort()[0]
            maps = folder / f"{name}-attention-{layer.name.replace(' ', '-')}.png"
            channel_maps(
                maps,
                layer.weights[chosen],
                tokens,
                [f"{layer.name}, {kind} {place}" for place in chosen.tolist()],
                title=f"Kalman attention: {title}",
            )
            written.append(maps)
    return written
