"""Figures of training curves."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

import numpy as np
from numpy.typing import ArrayLike

from kalmix.analysis.plots.style import COLOURS, INK, MUTED, picture


def loss_curve(
    path: str | PathLike[str],
    training: ArrayLike,
    held_out: ArrayLike,
    *,
    references: Mapping[str, float] | None = None,
    title: str = "Learning",
) -> str | PathLike[str]:
    """Draw bits per byte against the number of training tokens.

    Args:
        path: file to write: PNG, PDF or SVG. Beside a PNG file, an SVG file is written.
        training: `[n, 2]` token counts and bits per byte of training batches; drawn raw and smoothed.
        held_out: `[m, 2]` token counts and bits per byte of the held-out text; may be empty.
        references: bits per byte of other methods, by name, drawn as horizontal lines.
        title: heading of the figure.

    Returns:
        `path`.

    Example:
        >>> from kalmix.analysis import plots
        >>> training, held_out = [(1e5, 4.0), (2e5, 3.1), (3e5, 2.9)], [(3e5, 3.0)]
        >>> plots.loss_curve("loss.png", training, held_out, references={"gzip": 2.7})
        'loss.png'
    """
    seen, bits = np.asarray(training, float).reshape(-1, 2).T
    judged, score = np.asarray(held_out, float).reshape(-1, 2).T
    with picture(path, (7.5, 4.2)) as (_, (axes,)):
        axes.plot(seen / 1e6, bits, color=COLOURS[0], alpha=0.22, linewidth=0.8)
        axes.plot(seen / 1e6, _smooth(bits), color=COLOURS[0], label="training")
        if len(judged):
            axes.plot(judged / 1e6, score, color=COLOURS[1], marker="o", markersize=4, label="held-out text")
            axes.annotate(
                f"{score[-1]:.2f}",
                (judged[-1] / 1e6, score[-1]),
                (0, -13),
                textcoords="offset points",
                ha="center",
                color=COLOURS[1],
            )
        for name, level in (references or {}).items():
            axes.axhline(level, color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
            axes.annotate(
                f"{name}  {level:.2f}",
                (1, level),
                (0, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                color=MUTED,
            )
        levels = [*(references or {}).values(), *score[-1:], *_smooth(bits)[-1:]]
        if levels:
            high = float(np.quantile(bits, 0.97)) if len(bits) else max(levels)
            axes.set_ylim(min(*levels, *levels) - 0.15, max(high, max(levels) + 0.4))
        axes.set(title=title, xlabel="million tokens seen", ylabel="bits per byte")
        axes.grid(axis="x", visible=False)
        axes.legend(labelcolor=INK)
    return path


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return a bias-corrected exponential moving average over about a sixtieth of the values."""
    keep, total, weight, out = 1 - 1 / max(1.0, len(values) / 60), 0.0, 0.0, np.empty_like(values)
    for index, value in enumerate(values):
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out[index] = total / weight
    return out
