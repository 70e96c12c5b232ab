"""`kalmix train`: from any text to a language model and pictures of what it believes."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kalmix.errors import ArgumentError

if TYPE_CHECKING:
    from kalmix.training import Recipe

_LENGTH = ("steps", "minutes")  # what a resumed run may change


def run(
    context: typer.Context,
    text: Annotated[str | None, typer.Option(help="A UTF-8 text file or folder; this Python's documentation if absent.")] = None,
    tokens: Annotated[str, typer.Option(help="bpe, or bytes.")] = "bpe",
    vocabulary: Annotated[int, typer.Option(help="Pieces of the BPE.")] = 2048,
    layers: Annotated[str, typer.Option(help="Mixers: kla,kla,attention or 3*kla,attention, or JSON with options.")] = "3*kla",
    width: Annotated[int, typer.Option(help="Of the residual stream.")] = 192,
    block: Annotated[int, typer.Option(help="Tokens of a training sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences a step and device.")] = 8,
    accumulate: Annotated[int, typer.Option(help="Batches whose gradients make a step.")] = 1,
    documents: Annotated[bool, typer.Option("--documents", help="Forget at the start of each document.")] = False,
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long, learning rate at zero. [default: 3.5 without --steps]")] = None,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-3,
    decay: Annotated[float, typer.Option(help="Weight decay of matrices.")] = 0.1,
    warmup: Annotated[float, typer.Option(help="Part of the run in which the rate rises.")] = 0.02,
    cooldown: Annotated[float, typer.Option(help="Part of the run in which it falls.")] = 0.6,
    loss: Annotated[str, typer.Option(help="cross-entropy, or marginal (likelihood).")] = "cross-entropy",
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in mixed precision.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model first.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, order and samples.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Where everything goes.  [default: runs/ and the time]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output, as it was set up.")] = False,
) -> None:
    """Train a language model on a text, and say how well it compresses text that it never saw."""
    from kalmix.training import Recipe, parse_layers

    given = {name: value for name, value in context.params.items() if name not in ("output", "resume", "layers", *_LENGTH)}
    length = {name: value for name, value in (("steps", steps), ("minutes", minutes)) if value is not None}
    if resume:
        recipe = _resumed(context, output).with_(**length)
    else:
        recipe = Recipe(**given, layers=parse_layers(layers), **({"minutes": None, **length} if length else {}))
        output = output or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
    import torch
    from transformers.utils import logging

    from kalmix.cli.progress import ProgressBar
    from kalmix.cli.report import report
    from kalmix.training.run import train

    logging.disable_progress_bar()
    console = Console(highlight=False)
    ended = train(recipe, output, resume=resume, callbacks=[ProgressBar(console)])
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    if not ended.finished:
        console.print(f"interrupted after {ended.steps} steps; nothing is lost. To go on:", soft_wrap=True)
        console.print(f"  kalmix train --resume --output {output}", style="bold", soft_wrap=True, markup=False)
        raise typer.Exit(130)
    report(ended, console)


def _resumed(context: typer.Context, output: Path | None) -> Recipe:
    from kalmix.training import Recipe

    free = {"output", "resume", *_LENGTH}
    typed = [name for name in context.params if name not in free and context.get_parameter_source(name).name == "COMMANDLINE"]
    if output is None:
        raise ArgumentError("output", got="absent", needs="given with --resume: the folder of the run to go on with")
    if typed:
        raise ArgumentError(typed[0], got="given with --resume", needs="left out: a resumed run keeps its settings but for steps and minutes")
    return Recipe.load(output)
