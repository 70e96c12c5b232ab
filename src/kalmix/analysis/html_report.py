"""A reading as one HTML page: the tokens shaded by what the model believed. Nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from string import Template

from torch import Tensor

from kalmix.analysis.text_diagnostics import Reading
from kalmix.files import write_text


def write(path: Path, reading: Reading, *, title: str) -> Path:
    """Write the page to `path`; folders are made."""
    average = float(reading.surprisal.mean())
    data = {
        "tokens": reading.tokens,
        "names": reading.names,
        "surprisal": _short(reading.surprisal),
        "variance": [_short(row) for row in reading.variance],
        "gain": [_short(row) for row in reading.gain],
    }
    page = Template(files("kalmix.analysis").joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        summary=f"{len(reading.tokens)} tokens, {average:.2f} bits each on average. Point at a token for its numbers.",
        plain=html.escape("".join(reading.tokens)),
        # Inside a script element only "</" could end it early.
        data=json.dumps(data, ensure_ascii=False).replace("</", r"<\/").replace("<!--", r"<\!--"),
    )
    write_text(path, page)
    return path


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
