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
    cells = cells_with_weights(results)
    selection = [
        cell
        for cell in cells
        if (not task or {cell.task, cell.task.rpartition("/")[2]} & set(task))
        and (not layer or cell.layer in map(layer_name, layer))
    ]
    if not selection:
        known = dict.fromkeys(f"{cell.layer} on {cell.task}" for cell in cells)
        contents = f"{str(output)!r}, which has {', '.join(known) or 'no trained model'}"
        raise ArgumentError("output", got=contents, expected="a folder with a trained model of this task and layer")
    num_models = 0
    for cell in selection:
        if num_models < models:
            files = draw(cell, results, row)
            num_models += bool(files)
            for path in files:
                console.print(f"  {path}")
    if not num_models:
        contents = f"{', '.join(sorted({cell.layer for cell in selection}))}, which has no posterior"
        raise ArgumentError("layer", got=contents, expected="a layer with a posterior, such as kla")


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
    from kalmix_bench.runner.published_names import published_name

    data = draw_cell_data(cell)
    test = data.parts[0].test
    if row >= len(test):
        raise ArgumentError("row", got=row, expected=f"below {len(test)} (test rows of {cell})")
    model = load_trained_model(cell, data, results)
    tagger = model.encoder if isinstance(model, AutoEncoder) else model
    _, layers = diagnose_layers(tagger.model.layers, tagger.embed(torch.from_numpy(test.inputs[row])), weights=True)
    if not layers:
        return []
    queries = test.targets[row] != IGNORE_INDEX
    answers = np.isin(test.inputs[row], test.targets[row][queries])
    tokens, folder = [str(token) for token in test.inputs[row]], results.path.parent / "beliefs"
    name = re.sub(r"[^\w.]+", "-", f"{cell.task}-{cell.layer}-{cell.seed}")
    title = f"{published_name(cell.layer)}, {cell.task.rpartition('/')[2].replace('-', ' ')}"
    variance = folder / f"{name}-variance.png"
    posterior_variance(
        variance,
        [layer.variance for layer in layers],
        tokens,
        [layer.name for layer in layers],
        marks={} if queries.all() else {"tokens with the answer": answers, "queries": queries},
        title=f"Posterior variance: {title}",
    )
    files = [variance]
    for layer in layers:
        if layer.weights is not None:
            kind = "channel" if len(layer.weights) == layer.variance.shape[1] else "head"
            channels = torch.randperm(len(layer.weights), generator=torch.Generator().manual_seed(0))[:MAPS].sort()[0]
            maps = folder / f"{name}-attention-{layer.name.replace(' ', '-')}.png"
            channel_maps(
                maps,
                layer.weights[channels],
                tokens,
                [f"{layer.name}, {kind} {place}" for place in channels.tolist()],
                title=f"Kalman attention: {title}",
            )
            files.append(maps)
    return files
