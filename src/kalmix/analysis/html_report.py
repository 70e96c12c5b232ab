"""HTML page of text diagnostics: tokens shaded by variance, write gain or surprisal. It loads no other file."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from string import Template

from torch import Tensor

from kalmix.analysis.text_diagnostics import TextDiagnostics
from kalmix.files import write_text


def write(path: Path, diagnostics: TextDiagnostics, *, title: str) -> Path:
    """Write the page to `path`, create its folder, and return `path`."""
    average = float(diagnostics.surprisal.mean())
    data = {
        "tokens": diagnostics.tokens,
        "names": diagnostics.names,
        "surprisal": _short(diagnostics.surprisal),
        "variance": [_short(row) for row in diagnostics.variance],
        "gain": [_short(row) for row in diagnostics.gain],
    }
    page = Template(files("kalmix.analysis").joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        summary=f"{len(diagnostics.tokens)} tokens, {average:.2f} bits each on average. Hover over a token for values.",
        plain=html.escape("".join(diagnostics.tokens)),
        # Inside a script element only "</" could end it early.
        data=json.dumps(data, ensure_ascii=False).replace("</", r"<\/").replace("<!--", r"<\!--"),
    )
    write_text(path, page)
    return path


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
