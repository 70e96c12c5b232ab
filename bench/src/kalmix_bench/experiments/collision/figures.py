"""Figures of the collision experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from kalmix.analysis.plots.style import COLOURS, FAINT, INK, MUTED, picture
from kalmix_bench.runner.published_names import published_name

Curves = Mapping[str, ArrayLike]


class Sweep(NamedTuple):
    """One panel: a score against a varied condition.

    Attributes:
        x_label, y_label: axis labels.
        x: `[n]` values of the condition.
        curves: `[2, n]` mean and standard deviation over seeds, by model.
        trained_range: range of `x` in training.
        log_x: whether the x axis is logarithmic.
    """

    x_label: str
    y_label: str
    x: Sequence[float]
    curves: Curves
    trained_range: tuple[float, float]
    log_x: bool = False


def sweeps(path: str | PathLike[str], panels: Sequence[Sweep]) -> str | PathLike[str]:
    """Draw panels next to each other, with a band of one standard deviation around each mean; return the path."""
    with picture(path, (0.8 + 4.3 * len(panels), 3.7), columns=len(panels)) as (figure, axes):
        for panel, area in zip(panels, axes, strict=True):
            area.axvspan(*panel.trained_range, color=FAINT, alpha=0.6, linewidth=0)
            area.annotate("training range", (panel.trained_range[0], 0.02), (3, 0), **_INSIDE, color=MUTED, fontsize=7)
            for colour, (name, curve) in zip(COLOURS, panel.curves.items(), strict=False):
                mean, spread = np.asarray(curve, float)
                area.plot(panel.x, mean, color=colour, label=published_name(name))
                area.fill_between(panel.x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
            if panel.log_x:
                area.set_xscale("log", base=2)
                area.set_xticks(panel.x, [f"{x:g}" for x in panel.x])
            area.set(xlabel=panel.x_label, ylabel=panel.y_label)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", labelcolor=INK)
    return path


class MechanismCurves(NamedTuple):
    """Curves of the deterministic experiment, by model.

    Attributes:
        retrieval: `[T + 1]` pairwise retrieval at B before the first write and after each.
        uncertainty: `[T + 1]` variances along k_A and k_B; the first model is drawn solid, others dashed.
        gain: `[T]` scalar write gains.
        overlaps: `[n]` overlaps of `final`.
        final: `[n]` last retrieval at B.
        phases: numbers of writes before the boost and before the flood.
        crossings: first write after which A is preferred at B; 0 for none.
        levels: closed forms to draw: "boost" and "flood" (retrieval), "slope" (uncertainty per write), "gain".
    """

    retrieval: Curves
    uncertainty: Mapping[str, tuple[ArrayLike, ArrayLike]]
    gain: Curves
    overlaps: ArrayLike
    final: Curves
    phases: tuple[int, int]
    crossings: Mapping[str, int]
    levels: Mapping[str, float]


def mechanism(path: str | PathLike[str], curves: MechanismCurves) -> str | PathLike[str]:
    """Draw the deterministic experiment: Figure 3, a and b, above Figure 6, left and right; return the path."""
    retrieval, uncertainty, gain, overlaps, final, phases, crossings, levels = curves
    with picture(path, (10, 6.6), rows=2, columns=2) as (figure, (top, right, left, bottom)):
        colours = dict(zip(retrieval, COLOURS, strict=False))
        for name, curve in retrieval.items():
            top.plot(np.asarray(curve, float), color=colours[name], label=name)
            if crossings.get(name):
                top.plot(crossings[name], 0.5, "v", color=colours[name], markersize=6)
        top.axhline(0.5, color=MUTED, linewidth=0.8)
        for points, (name, label) in zip((3, 12), (("flood", "equation 57"), ("boost", "boost limit")), strict=True):
            _level(top, levels[name], f"{label}  {levels[name]:.3f}", points)
        top.set(title="Retrieval of B while A is flooded", ylabel="retrieval at B", ylim=(0, 1.1))
        _uncertainties(right, uncertainty, phases[1], levels["slope"])
        for name, curve in gain.items():
            left.plot(range(1, 1 + len(np.asarray(curve))), np.asarray(curve, float), color=colours[name])
        _level(left, levels["gain"], f"equation 42  {levels['gain']:.3f}")
        left.set(title="Write gain", ylabel="gain", ylim=(0.4, 1.05))
        for area in (top, right, left):
            area.set_xlabel("number of writes")
            for start in phases:
                area.axvline(start, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
            for start, name in zip((0, *phases), ("seed", "boost B", "flood A"), strict=True):
                area.annotate(name, (start, 1), (3, -9), **_INSIDE, color=MUTED, fontsize=7)
        for name, curve in final.items():
            bottom.plot(np.asarray(overlaps, float), np.asarray(curve, float), color=colours[name])
        bottom.axhline(0.5, color=MUTED, linewidth=0.8)
        bottom.set(title="Final retrieval of B", xlabel="overlap of the addresses", ylabel="retrieval at B")
        figure.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=5, labelcolor=INK)
    return path


def _uncertainties(area: Axes, curves: Mapping[str, tuple[ArrayLike, ArrayLike]], flood: int, slope: float) -> None:
    """Draw variances along both addresses, and the slope of equation 16 at the end of the first model's curve."""
    for number, (name, pair) in enumerate(curves.items()):
        for colour, key, curve in zip((COLOURS[1], COLOURS[2]), ("k_A", "k_B"), pair, strict=True):
            style = {"linestyle": "--", "linewidth": 1.0} if number else {}
            area.plot(np.asarray(curve, float), color=colour, label=f"along ${key}$, {name}", **style)
    end = np.asarray(next(iter(curves.values()))[1], float)
    writes = np.arange(flood + (len(end) - flood) // 3, len(end))
    line = end[-1] + slope * (writes - writes[-1]) + 0.06
    area.plot(writes, line, color=MUTED, linewidth=1, label=f"slope of equation 16, {slope:.5f} per write")
    area.set(title="Uncertainty along the addresses", ylabel="variance", ylim=(0, 1.05))
    area.legend(fontsize=7, labelcolor=INK, loc="upper right", bbox_to_anchor=(1, 0.94))


def _level(area: Axes, at: float, name: str, points: int = 3) -> None:
    area.axhline(at, color=MUTED, linewidth=1, linestyle=":")
    area.annotate(name, (1, at), (-2, points), **_LEVEL, ha="right", color=MUTED, fontsize=7)


_INSIDE = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
_LEVEL = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
