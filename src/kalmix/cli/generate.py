"""`kalmix generate`: generate text with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kalmix._extras import require_extra
from kalmix.cli.options import Device
from kalmix.training.recipe_checks import MAX_SEED


def run(
    model: Annotated[
        Path, typer.Argument(help="Output folder of `kalmix train`, RUN/checkpoint-N, or a model folder.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from likeliest tokens of this mass.")] = 0.95,
    predict: Annotated[
        str | None,
        typer.Option(
            help="mean: of the last layer's read-out; marginal: probabilities averaged over samples of it (KLA+). "
            "Default: the model's setting."
        ),
    ] = None,
    device: Device = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_SEED, help="Random seed. Default: another text in each run.")
    ] = None,
) -> None:
    """Generate text from a prompt and print each token at once."""
    require_extra("`kalmix generate`", "hf")
    from transformers import set_seed

    from kalmix.cli.load_run import load, move
    from kalmix.training.data import check_unicode
    from kalmix.training.sampling import ContinuationStreamer, generate

    check_unicode("prompt", prompt)
    network, tokenizer = load(model, predict)
    move(network, device)
    if seed is not None:
        set_seed(seed)
    typer.secho(prompt, nl=False, bold=True)  # as it is: rich would replace tabs, and names of emoji such as ":key:"
    generate(
        *(network, tokenizer, prompt),
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        streamer=ContinuationStreamer(tokenizer),
    )
