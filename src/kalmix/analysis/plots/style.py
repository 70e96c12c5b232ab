"""Style of all figures, and a context that draws and writes one without changing matplotlib's global state."""

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
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kalmix.errors import ArgumentError
from kalmix.files import replace_file

INK, MUTED, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
# Okabe and Ito's palette, which readers with a colour vision deficiency can tell apart, and a marker for each colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
VARIANCE, GAIN, WEIGHT, SIGN = "Blues", "Oranges", "magma", "RdBu_r"
LABELLED = 128  # largest number of tokens whose labels do not overlap

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
    "svg.hashsalt": "kalmix",
}


@contextmanager
def picture(
    path: str | PathLike[str], size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure and its axes; write the figure to `path` when the block ends, and an SVG file beside a PNG file.

    Args:
        path: PNG, PDF or SVG file; its folder is created.
        size: width and height in inches.
        rows, columns: grid of axes.
        options: further arguments of `Figure.subplots`.

    Raises:
        ArgumentError: matplotlib does not support the suffix of `path`.
    """
    path = Path(path)
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        expected = "a file name with the suffix .png, .pdf or .svg"
        raise ArgumentError("path", got=repr(str(path)), expected=expected)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        yield figure, list(axes.flat)
        mark_lines(figure)
        engine = figure.get_layout_engine()
        assert engine is not None
        engine.execute(figure)
        figure.set_layout_engine(None)  # each `savefig` would compute the layout again and draw the figure twice
        for target in [path.with_suffix(".svg"), path] if path.suffix.lower() == ".png" else [path]:
            with replace_file(target) as partial, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph .* missing")  # texts come in every script
                figure.savefig(partial, format=target.suffix[1:])


def mark_lines(figure: Figure) -> None:
    """Give lines in a colour of `COLOURS` that colour's marker, so that they differ in grey too.

    Long lines get about nine markers. Lines without a line style, dotted levels and faint lines are left as they are.
    """
    for line in figure.findobj(Line2D):
        colour = to_hex(line.get_color())
        if colour not in COLOURS or line.get_linestyle() in ("None", ":") or (line.get_alpha() or 1) < 0.5:
            continue
        place, points = COLOURS.index(colour), len(np.atleast_1d(line.get_xdata()))
        if points > 3:  # lines of legends have three points, and mark the second
            step = 1 if points <= 16 else points // 9
            line.set_markevery((place * step // len(MARKERS), step))
        line.set_marker(MARKERS[place])
        line.set_markersize(3.5)


def width_for(tokens: int) -> float:
    """Return a figure width in inches with room for the tokens' labels; 10 if there are too many to label."""
    return float(np.clip(1.8 + 0.125 * tokens, 7.0, 18.0)) if tokens <= LABELLED else 10.0


def label_tokens(axes: Axes, tokens: Sequence[str]) -> None:
    """Write the tokens under the axis if there are at most `LABELLED`."""
    if len(tokens) <= LABELLED:
        axes.set_xticks(
            range(len(tokens)), [printable(token) for token in tokens], rotation=90, family="monospace", fontsize=6.5
        )
        axes.tick_params(axis="x", length=0, labelcolor=INK)
    else:
        axes.set_xlabel("token")


def printable(token: str) -> str:
    """Return a token for a label: at most 14 characters, white space visible, unprintable characters replaced."""
    shown = token.translate({ord(" "): "·", ord("\n"): "⏎", ord("\t"): "⇥"})
    shown = shown if len(shown) <= 14 else shown[:13] + "…"
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in shown).replace("$", r"\$")
