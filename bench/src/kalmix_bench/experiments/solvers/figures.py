"""Figures of the solver studies: panels of curves with logarithmic axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from os import PathLike

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from kalmix.analysis.plots.style import COLOURS, INK, MUTED, picture


@dataclass(frozen=True)
class Panel:
    """Curves of one pair of axes with a logarithmic y axis.

    Attributes:
        title: title of the panel.
        x_label, y_label: axis labels.
        curves: x and y, by name.
        dashed: x and y of dashed curves in the colours of `curves`, in order; not in the legend.
        levels: y values to mark, by name.
        log_x: whether the x axis is logarithmic too.
        legend_above: whether the legend is above the curves.
    """

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]]
    dashed: Sequence[tuple[ArrayLike, ArrayLike]] = ()
    levels: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    legend_above: bool = False


def panels(path: str | PathLike[str], charts: Sequence[Panel], columns: int = 3) -> str | PathLike[str]:
    """Draw panels row by row, each with its legend; a name has the same colour in all of them. Return the path."""
    colours = _colours(panel.curves for panel in charts)
    rows = -(-len(charts) // columns)
    with picture(path, (0.4 + 4.1 * columns, 0.3 + 3.3 * rows), rows=rows, columns=columns) as (_, axes):
        for area in axes[len(charts) :]:
            area.set_axis_off()
        for panel, area in zip(charts, axes, strict=False):
            for name, (x, y) in panel.curves.items():
                area.plot(np.asarray(x, float), np.asarray(y, float), color=colours[name], label=name)
            for name, (x, y) in zip(panel.curves, panel.dashed, strict=False):
                dashed = {"color": colours[name], "linestyle": "--", "linewidth": 1}
                area.plot(np.asarray(x, float), np.asarray(y, float), **dashed)
            for name, level in panel.levels.items():
                area.axhline(level, color=MUTED, linewidth=1, linestyle=":")
                coordinates = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
                area.annotate(name, (1, level), (-2, 3), **coordinates, ha="right", color=MUTED, fontsize=7)
            area.set_yscale("log")
            if panel.legend_above:
                low, high = area.get_ylim()
                area.set_ylim(low, high * (high / low) ** (0.09 * len(panel.curves)))
            if panel.log_x:
                area.set_xscale("log")
            else:
                area.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            area.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
            area.legend(
                loc="upper right" if panel.legend_above else "best",
                fontsize=7,
                labelcolor=INK,
                frameon=True,
                framealpha=0.85,
                edgecolor="none",
            )
    return path


def _colours(panels: Iterable[Iterable[str]]) -> dict[str, str]:
    """Assign a colour to each name: the first that no other name of its panels has, until all are used."""
    colours: dict[str, str] = {}
    for names in map(list, panels):
        used = {colours.get(name) for name in names}
        free = [colour for colour in COLOURS if colour not in used]
        new = (name for name in names if name not in colours)
        colours |= dict(zip(new, chain(free, cycle(COLOURS)), strict=False))
    return colours
