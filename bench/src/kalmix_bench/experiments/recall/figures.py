"""Benchmarks: scores by width, by length and load, and how they were learned."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from kalmix.analysis.plots.style import COLOURS, INK, MUTED, picture

Curve = tuple[ArrayLike, ArrayLike, ArrayLike]  # x, y, and half the height of its bar
_LETTERS = 62  # of small print on a line above a panel


@dataclass(frozen=True)
class Lines:
    """Curves of one pair of axes, by name.

    Attributes:
        title, under: what it shows; and the small print, which is wrapped.
        across, up: of what its axes are.
        curves: x, whole numbers, y and standard error.
        levels: heights to mark, by name: what papers print.
        doubling: whether x is drawn by its logarithm.
    """

    title: str
    under: str
    across: str
    up: str
    curves: Mapping[str, Curve]
    levels: Mapping[str, float]
    doubling: bool = False


def benchmark_lines(path: str | PathLike[str], drawn: Sequence[Lines], columns: int = 3) -> str | PathLike[str]:
    """Draw panels row by row; a name has one colour in all of them."""
    columns = min(columns, len(drawn))
    rows = -(-len(drawn) // columns)
    names = list(dict.fromkeys(name for panel in drawn for name in panel.curves))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    with picture(path, (0.6 + 4.1 * columns, 0.8 + 3.1 * rows), rows=rows, columns=columns) as (figure, axes):
        for area in axes[len(drawn) :]:
            area.set_axis_off()
        handles: dict[str, Line2D] = {}
        for panel, area in zip(drawn, axes, strict=False):
            for name, (x, y, error) in panel.curves.items():
                x, y, error = (np.asarray(values, float) for values in (x, y, error))
                marker = {"marker": "o", "markersize": 3} if len(x) < 12 else {}
                (handles[name],) = area.plot(x, y, color=colours[name], **marker)
                if np.isfinite(error).all():
                    area.fill_between(x, y - error, y + error, color=colours[name], alpha=0.15, linewidth=0)
            for name, level in panel.levels.items():
                area.axhline(level, color=colours.get(name, MUTED), linewidth=1, linestyle=":")
            if panel.doubling:
                area.set_xscale("log", base=2)
                area.xaxis.set_major_formatter("{x:g}")
            else:
                area.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
            area.set(xlabel=panel.across, ylabel=panel.up)
            _head(area, panel)
        if any(panel.levels for panel in drawn):
            handles["its paper, at its own size"] = Line2D([], [], color=MUTED, linewidth=1, linestyle=":")
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, labelcolor=INK, fontsize=8)
    return path


def _head(area: Axes, panel: Lines) -> None:
    """The title, and between it and the axes the small print."""
    lines = textwrap.wrap(panel.under, _LETTERS)
    area.set_title(panel.title, pad=6 + 9 * len(lines))
    area.annotate(
        "\n".join(lines),
        (0, 1),
        (0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        va="bottom",
        fontsize=7,
        color=MUTED,
    )


@dataclass(frozen=True)
class HeatMap:
    """Scores in percent at places of two kinds.

    Attributes:
        across: what the second kind is.
        scores: by a place of each kind; what is missing is left white.
    """

    across: str
    scores: Mapping[tuple[Any, Any], float]


def heat_maps(
    path: str | PathLike[str], maps: Mapping[str, HeatMap], *, down: str, abreast: int = 6
) -> str | PathLike[str]:
    """Draw maps by name, so many abreast, each with the places that it has, in their order."""
    abreast = min(abreast, len(maps))
    lines = -(-len(maps) // abreast)
    with picture(path, (0.8 + 2.2 * abreast, 0.3 + 2.6 * lines), rows=lines, columns=abreast) as (figure, axes):
        for area in axes[len(maps) :]:
            area.set_axis_off()
        shown = None
        for place, (area, (name, drawn)) in enumerate(zip(axes, maps.items(), strict=False)):
            rows, columns = (sorted({at[kind] for at in drawn.scores}) for kind in (0, 1))
            grid = np.array([[drawn.scores.get((row, column), np.nan) for column in columns] for row in rows])
            shown = area.imshow(grid, cmap="viridis", vmin=0, vmax=100, aspect="auto")
            for (row, column), value in np.ndenumerate(grid):
                if np.isfinite(value):
                    colour = "white" if value < 60 else INK
                    area.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=7)
            area.set_xticks(range(len(columns)), list(map(str, columns)))
            area.set_yticks(range(len(rows)), list(map(str, rows)))
            area.set(title=name, xlabel=drawn.across, ylabel="" if place % abreast else down)
            area.grid(visible=False)
        if shown is not None:
            figure.colorbar(shown, ax=axes, shrink=0.9, label="score %")
    return path
