"""Figures of trajectories, predictions, propagated estimates and relative errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import ArrayLike

from kalmix.analysis.plots.style import COLOURS, INK, MARKERS, MUTED, picture
from kalmix_bench.runner.published_names import published_name


@dataclass(frozen=True)
class Path2D:
    """One trajectory in the plane.

    Attributes:
        title: title of the panel.
        state: `[T, 2]` true states.
        measurements: `[T, 2]`.
        predicted: `[n, 2]` predictions of a model from the measurements before.
    """

    title: str
    state: ArrayLike
    measurements: ArrayLike
    predicted: ArrayLike


@dataclass(frozen=True)
class Clouds:
    """Estimates of a state at some times, one from each earlier measurement.

    Attributes:
        title: title of the panel.
        state: `[T, 2]` true states.
        at: tokens at which estimates are compared.
        estimates: for each of `at`, `[n, 2]` estimates of the state there, one per measurement so far.
    """

    title: str
    state: ArrayLike
    at: Sequence[int]
    estimates: Sequence[ArrayLike]


def paths(path: str | PathLike[str], panels: Sequence[Path2D]) -> str | PathLike[str]:
    """Draw trajectories next to each other, with measurements and predictions (Figure 1); return the path."""
    with picture(path, (0.4 + 3.9 * len(panels), 4.1), columns=len(panels)) as (figure, axes):
        for area, one in zip(axes, panels, strict=True):
            area.plot(*np.asarray(one.measurements, float).T, ".", color=COLOURS[5], markersize=4, label="measured")
            area.plot(*np.asarray(one.state, float).T, color=INK, label="true state")
            area.plot(*np.asarray(one.predicted, float).T, color=COLOURS[1], linewidth=1.2, label="predicted")
            _plane(area, one.title)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, labelcolor=INK)
    return path


def clouds(path: str | PathLike[str], panels: Sequence[Clouds]) -> str | PathLike[str]:
    """Draw propagated estimates, one colour and marker per time, and true states (large; Figure 2); return the path."""
    with picture(path, (0.4 + 3.9 * len(panels), 3.9), columns=len(panels)) as (figure, axes):
        for area, one in zip(axes, panels, strict=True):
            state = np.asarray(one.state, float)
            area.plot(*state.T, color=INK, linewidth=1, label="true trajectory")
            for colour, marker, at, estimates in zip(COLOURS, MARKERS, one.at, one.estimates, strict=False):
                area.plot(*np.asarray(estimates, float).T, marker, color=colour, markersize=2.5, alpha=0.5)
                state_style: dict[str, Any] = {"color": colour, "markeredgecolor": INK, "linestyle": "none"}
                area.plot(*state[at], marker=marker, markersize=8, label=f"state at token {at}", **state_style)
            _plane(area, one.title)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, labelcolor=INK)
    return path


def ratios(
    path: str | PathLike[str], squared_errors: Mapping[str, Mapping[str, Sequence[float]]], label: str
) -> str | PathLike[str]:
    """Draw errors relative to a reference: a row per setting, a mark per seed of a model. Return the path.

    Args:
        path: file to write.
        errors: relative errors by setting and model, one per seed.
        label: label of the x axis.
    """
    with picture(path, (7.5, 0.9 + 0.5 * len(squared_errors))) as (figure, (axes,)):
        names = list(dict.fromkeys(name for models in squared_errors.values() for name in models))
        for index, (colour, marker, name) in enumerate(zip(COLOURS, MARKERS, names, strict=False)):
            rows = [row for row, models in enumerate(squared_errors.values()) for _ in models.get(name, ())]
            values = [value for models in squared_errors.values() for value in models.get(name, ())]
            heights = [row + 0.5 * (index + 0.5) / len(names) - 0.25 for row in rows]
            axes.plot(values, heights, marker, color=colour, markersize=4, label=published_name(name))
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.set_yticks(range(len(squared_errors)), list(squared_errors))
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, (1, 1.2, 1.5, 2, 3, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(label)
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside right upper", labelcolor=INK)
    return path


def _plane(area: Axes, title: str) -> None:
    area.set(title=title, xlabel="$x_1$", ylabel="$x_2$")
    area.set_aspect("equal", "datalim")
