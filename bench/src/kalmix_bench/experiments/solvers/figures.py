"""Curves of the studies of solvers, side by side."""

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
    """Curves of one pair of axes, y drawn by its logarithm.

    Attributes:
        title, across, up: what it shows, and of what its axes are.
        curves: x and y, by name.
        faint: the same, dashed, in the colours of `curves` from the first on, not in the legend.
        levels: heights to mark, by name.
        doubling: whether x is drawn by its logarithm too.
        marked: whether points are.
        apart: whether the legend stands above the curves.
    """

    title: str
    across: str
    up: str
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]]
    faint: Sequence[tuple[ArrayLike, ArrayLike]] = ()
    levels: Mapping[str, float] = field(default_factory=dict)
    doubling: bool = False
    marked: bool = False
    apart: bool = False


def panels(path: str | PathLike[str], drawn: Sequence[Panel], columns: int = 3) -> str | PathLike[str]:
    """Draw panels row by row, each with its legend; a name has one colour in all of them."""
    colours = _colours(panel.curves for panel in drawn)
    rows = -(-len(drawn) // columns)
    with picture(path, (0.4 + 4.1 * columns, 0.3 + 3.3 * rows), rows=rows, columns=columns) as (_, axes):
        for area in axes[len(drawn) :]:
            area.set_axis_off()
        for panel, area in zip(drawn, axes, strict=False):
            marker = {"marker": "o", "markersize": 3} if panel.marked else {}
            for name, (x, y) in panel.curves.items():
                area.plot(np.asarray(x, float), np.asarray(y, float), color=colours[name], label=name, **marker)
            for name, (x, y) in zip(panel.curves, panel.faint, strict=False):
                dashed = {"color": colours[name], "linestyle": "--", "linewidth": 1}
                area.plot(np.asarray(x, float), np.asarray(y, float), **dashed, **marker)
            for name, level in panel.levels.items():
                area.axhline(level, color=MUTED, linewidth=1, linestyle=":")
                where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
                area.annotate(name, (1, level), (-2, 3), **where, ha="right", color=MUTED, fontsize=7)
            area.set_yscale("log")
            if panel.apart:
                low, high = area.get_ylim()
                area.set_ylim(low, high * (high / low) ** (0.09 * len(panel.curves)))
            if panel.doubling:
                area.set_xscale("log")
            else:
                area.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            area.set(title=panel.title, xlabel=panel.across, ylabel=panel.up)
            area.legend(
                loc="upper right" if panel.apart else "best",
                fontsize=7,
                labelcolor=INK,
                frameon=True,
                framealpha=0.85,
                edgecolor="none",
            )
    return path


def _colours(panels: Iterable[Iterable[str]]) -> dict[str, str]:
    """A colour for each name; in a panel each is the first that no name of it has had before, until all are taken."""
    chosen: dict[str, str] = {}
    for names in map(list, panels):
        taken = {chosen.get(name) for name in names}
        free = [colour for colour in COLOURS if colour not in taken]
        new = (name for name in names if name not in chosen)
        chosen |= dict(zip(new, chain(free, cycle(COLOURS)), strict=False))
    return chosen
