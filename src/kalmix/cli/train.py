"""`kalmix train`: train a language model on a text, evaluate it and draw figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kalmix.cli.run_recipe import output_folder, resumed_recipe, run_recipe
from kalmix.training.recipe import DEFAULT_MINUTES, Recipe, parse_layers


def run(
    context: typer.Context,
    text: Annotated[
        str | None, typer.Option(help="UTF-8 text file or folder. Default: the documentation of Python.")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="bpe or bytes.")] = Recipe.tokenizer,
    vocab_size: Annotated[int, typer.Option(help="Largest vocabulary of a BPE tokenizer.")] = Recipe.vocab_size,
    layers: Annotated[
        str,
        typer.Option(help="Layers: kla,kla,attention or 3*kla,attention, or JSON with options (`kalmix list layers`)."),
    ] = "kla,kla,kla",
    hidden_size: Annotated[int, typer.Option(help="Hidden size.")] = Recipe.hidden_size,
    seq_len: Annotated[int, typer.Option(help="Tokens per training sequence.")] = Recipe.seq_len,
    batch_size: Annotated[int, typer.Option(help="Sequences per batch on each device.")] = Recipe.batch_size,
    grad_accum: Annotated[int, typer.Option(help="Batches per optimizer step.")] = Recipe.grad_accum,
    separate_documents: Annotated[
        bool, typer.Option("--separate-documents", help="Reset the state at the start of each document.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.")] = None,
    minutes: Annotated[float | None, typer.Option(help=f"Time limit ({DEFAULT_MINUTES} without --steps).")] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = Recipe.learning_rate,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of matrices.")] = Recipe.weight_decay,
    warmup: Annotated[float, typer.Option(help="Fraction of the run with a rising learning rate.")] = Recipe.warmup,
    cooldown: Annotated[float, typer.Option(help="Fraction with a falling one, to 0.")] = Recipe.cooldown,
    loss: Annotated[str, typer.Option(help="cross-entropy, or marginal (likelihood under the belief).")] = Recipe.loss,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in mixed precision.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False,  # noqa: A002
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and samples.")] = Recipe.seed,
    output: Annotated[str | None, typer.Option(help="Output folder. Default: runs/TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output with its settings.")] = False,
) -> None:
    """Train a language model on a text, then evaluate it on held-out text as `kalmix report` does."""
    folder = output_folder(output)
    if resume:
        recipe = resumed_recipe(context, output)
    else:
        given = {name: value for name, value in context.params.items() if name not in ("output", "resume")}
        given |= {"text": str(Path(text).resolve()) if text and text.strip() else text, "layers": parse_layers(layers)}
        given["minutes"] = DEFAULT_MINUTES if steps is None and minutes is None else minutes
        recipe = Recipe(**given)
    run_recipe(recipe, folder, resume=resume, command="train")
