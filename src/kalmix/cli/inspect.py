"""`kalmix inspect`: variance, write gain and surprisal of each token of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix._extras import require_extra
from kalmix.cli.options import Device
from kalmix.errors import ArgumentError


def run(
    model: Annotated[
        Path, typer.Argument(help="Output folder of `kalmix train`, RUN/checkpoint-N, or a model folder.")
    ],
    text: Annotated[str | None, typer.Option(help="Text to inspect.")] = None,
    file: Annotated[Path | None, typer.Option(help="UTF-8 file with the text.")] = None,
    characters: Annotated[int, typer.Option(min=1, help="Number of characters of the file to read.")] = 2000,
    device: Device = None,
    output: Annotated[Path, typer.Option(help="Folder for beliefs.png and beliefs.html.")] = Path(),
) -> None:
    """Write a figure and an HTML page of each token's predictive variance, write gain and surprisal."""
    if (text is None) == (file is None):
        raise ArgumentError(
            "text", problem="is missing" if text is None else "is given twice", expected="either --text or --file"
        )
    require_extra("`kalmix inspect`", "train")
    from kalmix.analysis import html_report
    from kalmix.analysis.plots import beliefs
    from kalmix.analysis.text_diagnostics import diagnose_text
    from kalmix.cli.load_run import load, move
    from kalmix.training.corpus import read_documents

    if file is not None:
        text = "\n\n".join(read_documents(file).values())[:characters]
    network, tokenizer = load(model)
    move(network, device)
    found = diagnose_text(network, tokenizer, text or "")
    figure = output / "beliefs.png"
    beliefs(figure, found.tokens, found.surprisal, found.variance, found.gain, found.names)
    page = html_report.write(output / "beliefs.html", found, title=f"Beliefs of {model.name}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(found.tokens)} tokens, {float(found.surprisal.mean()):.2f} bits each on average")
    for path in (figure, page):
        console.print(f"  {path}")
