"""Trajectories, what a model predicts of them, and what it pulls forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import ArrayLike

from kalmix.analysis.plots.style import COLOURS, INK, MUTED, picture


@dataclass(frozen=True)
class Path2D:
    """One trajectory in the plane.

    Attributes:
        title: what it shows.
        state: `[T, 2]` the truth.
        measured: `[T, 2]`.
        predicted: `[n, 2]` by a model, from the measurements before.
    """

    title: str
    state: ArrayLike
    measurements: ArrayLike
    predicted: ArrayLike


@dataclass(frozen=True)
class Clouds:
    """What a model makes of each measurement at some later times.

    Attributes:
        title: what it shows.
        state: `[T, 2]` the truth.
        at: tokens at which estimates are compared.
        pulled: for each of `at`, `[n, 2]` estimates of the state there, one a measurement so far.
    """

    title: str
    state: ArrayLike
    at: Sequence[int]
    pulled: Sequence[ArrayLike]


def paths(path: str | PathLike[str], drawn: Sequence[Path2D]) -> str | PathLike[str]:
    """Draw trajectories side by side: truth black, measurements blue, predictions red (Figure 1)."""
    with picture(path, (0.4 + 3.9 * len(drawn), 4.1), columns=len(drawn)) as (figure, axes):
        for area, one in zip(axes, drawn, strict=True):
            area.plot(*np.asarray(one.measurements, float).T, "o", color=COLOURS[0], markersize=2.5, label="measured")
            area.plot(*np.asarray(one.state, float).T, color=INK, label="truth")
            area.plot(*np.asarray(one.predicted, float).T, color=COLOURS[6], linewidth=1.2, label="predicted")
            _plane(area, one.title)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, labelcolor=INK)
    return path


def clouds(path: str | PathLike[str], drawn: Sequence[Clouds]) -> str | PathLike[str]:
    """Draw estimates pulled forward, each time in its colour, over the truth, crosses where it was then (Figure 2)."""
    with picture(path, (0.4 + 3.9 * len(drawn), 3.9), columns=len(drawn)) as (_, axes):
        for area, one in zip(axes, drawn, strict=True):
            state = np.asarray(one.state, float)
            area.plot(*state.T, color=INK, linewidth=1)
            for colour, at, pulled in zip(COLOURS, one.at, one.pulled, strict=False):
                area.plot(*np.asarray(pulled, float).T, "o", color=colour, markersize=2.5, alpha=0.5)
                area.plot(*state[at], "X", color=colour, markeredgecolor=INK, markersize=8)
            _plane(area, one.title)
    return path


def ratios(
    path: str | PathLike[str], squared_errors: Mapping[str, Mapping[str, Sequence[float]]], of: str
) -> str | PathLike[str]:
    """Draw errors as multiples of the least, a row a setting, a mark a seed of a model.

    Args:
        path: where to write.
        errors: by setting and model, one a seed, the least being 1.
        of: what is divided by what.
    """
    with picture(path, (7.5, 0.9 + 0.5 * len(squared_errors))) as (figure, (axes,)):
        names = list(dict.fromkeys(name for models in squared_errors.values() for name in models))
        for place, (colour, name) in enumerate(zip(COLOURS, names, strict=False)):
            rows = [row for row, models in enumerate(squared_errors.values()) for _ in models.get(name, ())]
            values = [value for models in squared_errors.values() for value in models.get(name, ())]
            heights = [row + 0.5 * (place + 0.5) / len(names) - 0.25 for row in rows]
            axes.plot(values, heights, "o", color=colour, markersize=4, label=name)
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.set_yticks(range(len(squared_errors)), list(squared_errors))
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, (1, 1.2, 1.5, 2, 3, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(of)
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside right upper", labelcolor=INK)
    return path


def _plane(area: Axes, title: str) -> None:
    area.set(title=title, xlabel="$x_1$", ylabel="$x_2$")
    area.set_aspect("equal", "datalim")
