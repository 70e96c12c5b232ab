"""`kalmix inspect`: what a model believes about a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix._extras import require_extra
from kalmix.errors import ArgumentError


def run(
    model: Annotated[Path, typer.Argument(help="A folder that `kalmix train` wrote.")],
    text: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 file that holds it.")] = None,
    characters: Annotated[int, typer.Option(min=1, help="How much of the file to read.")] = 2000,
    output: Annotated[Path, typer.Option(help="Where to write beliefs.png and beliefs.html.")] = Path(),
) -> None:
    """Predictive variance, write gain and surprisal of each token, as a picture and as a page."""
    if (text is None) == (file is None):
        raise ArgumentError("text", got="given twice" if text else "absent", expected="given once, by --text or --file")
    require_extra("`kalmix inspect`", "train")
    from kalmix.analysis import html_report as page
    from kalmix.analysis.plots import beliefs
    from kalmix.analysis.text_diagnostics import read
    from kalmix.cli.load_run import load
    from kalmix.training.corpus import read_documents

    if file is not None:
        text = "\n\n".join(read_documents(file).values())[:characters]
    network, tokenizer = load(model)
    reading = read(network, tokenizer, text or "")
    picture = beliefs(
        output / "beliefs.png", reading.tokens, reading.surprisal, reading.variance, reading.gain, reading.names
    )
    written = page.write(output / "beliefs.html", reading, title=f"What {model.name} believes")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(reading.tokens)} tokens, {float(reading.surprisal.mean()):.2f} bits each on average")
    for path in (picture, written):
        console.print(f"  {path}")
