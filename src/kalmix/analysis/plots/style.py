"""How every picture looks, and the one way it reaches a file; matplotlib's global state is left as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kalmix.files import replace_file

INK, MUTED, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = ("#2563eb", "#ea580c", "#059669", "#c026d3", "#ca8a04", "#0891b2", "#dc2626", "#4f46e5")
VARIANCE, GAIN, WEIGHT, SIGN = "Blues", "Oranges", "magma", "RdBu_r"
LABELLED = 128  # tokens: more labels than this would touch

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "savefig.facecolor": "white",
}


@contextmanager
def picture(
    path: str | PathLike[str], size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of `size` inches and its axes, written to `path` (PNG, PDF, SVG) at the end; folders are made."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        yield figure, list(axes.flat)
        with replace_file(Path(path)) as partial, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # texts come in every script
            figure.savefig(partial)


def width_for(tokens: int) -> float:
    """Inches that give each token's label room; where there are too many to label, no more than is pleasant."""
    return float(np.clip(1.8 + 0.125 * tokens, 7.0, 18.0)) if tokens <= LABELLED else 10.0


def label_tokens(axes: Axes, tokens: Sequence[str]) -> None:
    """Write the tokens under the axis where there is room for them."""
    if len(tokens) <= LABELLED:
        axes.set_xticks(
            range(len(tokens)), [visible(token) for token in tokens], rotation=90, family="monospace", fontsize=6.5
        )
        axes.tick_params(axis="x", length=0, labelcolor=INK)
    else:
        axes.set_xlabel("token")


def visible(token: str) -> str:
    """A token, cut if long, with its white space made visible and nothing that a font or mathtext would trip over."""
    shown = token.translate({ord(" "): "·", ord("\n"): "⏎", ord("\t"): "⇥"})
    shown = shown if len(shown) <= 14 else shown[:13] + "…"
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in shown).replace("$", r"\$")
