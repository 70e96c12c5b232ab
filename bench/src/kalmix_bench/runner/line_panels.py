"""Figures of line panels: curves with standard errors, one colour and marker per name."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from kalmix.analysis.plots.style import COLOURS, INK, MUTED, picture
from kalmix_bench.runner.scores import Score

LINES = ("-", "--", "-.")  # of the first eight curves, the next eight, and so on
Curve = tuple[ArrayLike, ArrayLike, ArrayLike]  # x, mean, standard error
_LINE_CHARS = 62  # characters per line of a subtitle


@dataclass(frozen=True)
class LinePanel:
    """Curves of one pair of axes.

    Attributes:
        title: title of the panel.
        subtitle: text below the title; it is wrapped.
        x_label, y_label: axis labels, with units.
        curves: x, mean and standard error, by name.
        levels: y values to mark by dotted lines, by name: values that papers print.
        log_x: whether the x axis is logarithmic.
    """

    title: str
    subtitle: str
    x_label: str
    y_label: str
    curves: Mapping[str, Curve]
    levels: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False


def seed_curve(seeds: Sequence[Sequence[float]], factor: float = 1) -> Curve:
    """Return epochs, means and standard errors over seeds, up to the epoch that all seeds reached.

    Args:
        seeds: one sequence of values per seed.
        factor: multiplies the values.
    """
    scores = [Score.of([factor * value for value in values]) for values in zip(*seeds, strict=False)]
    means, errors = zip(*scores, strict=True)
    return list(range(1, len(scores) + 1)), means, errors


def draw_line_panels(path: str | PathLike[str], panels: Sequence[LinePanel], columns: int = 3) -> str | PathLike[str]:
    """Draw panels row by row with one legend; a name has the same colour and line in all. Return the path."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    styles = {name: LINES[index // len(COLOURS) % len(LINES)] for index, name in enumerate(names)}
    with picture(path, (0.6 + 4.1 * columns, 0.8 + 3.1 * rows), rows=rows, columns=columns) as (figure, axes):
        for area in axes[len(panels) :]:
            area.set_axis_off()
        handles: dict[str, Line2D] = {}
        for panel, area in zip(panels, axes, strict=False):
            for name, (x, y, error) in panel.curves.items():
                x, y, error = (np.asarray(values, float) for values in (x, y, error))
                (handles[name],) = area.plot(x, y, color=colours[name], linestyle=styles[name])
                if np.isfinite(error).all():
                    area.fill_between(x, y - error, y + error, color=colours[name], alpha=0.15, linewidth=0)
            for name, level in panel.levels.items():
                area.axhline(level, color=colours.get(name, MUTED), linewidth=1, linestyle=":")
            if panel.log_x:
                area.set_xscale("log", base=2)
                area.xaxis.set_major_formatter("{x:g}")
            else:
                area.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
            area.set(xlabel=panel.x_label, ylabel=panel.y_label)
            _set_titles(area, panel)
        if any(panel.levels for panel in panels):
            handles["paper, at its own size"] = Line2D([], [], color=MUTED, linewidth=1, linestyle=":")
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, labelcolor=INK, fontsize=8)
    return path


def _set_titles(area: Axes, panel: LinePanel) -> None:
    """Set the title, and the subtitle between it and the axes."""
    lines = textwrap.wrap(panel.subtitle, _LINE_CHARS)
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
