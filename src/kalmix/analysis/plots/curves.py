"""Figures of training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from os import PathLike

import numpy as np
from numpy.typing import ArrayLike

from kalmix.analysis.plots.arguments import read_numbers
from kalmix.analysis.plots.style import COLOURS, INK, MUTED, picture
from kalmix.errors import ArgumentError


def loss_curve(
    path: str | PathLike[str],
    training: ArrayLike,
    held_out: ArrayLike,
    *,
    references: Mapping[str, float] | None = None,
    title: str = "Learning",
) -> str | PathLike[str]:
    """Draw bits per byte against the number of training tokens, in millions.

    Args:
        path: file to write, with the suffix .png, .pdf or .svg, or another that matplotlib supports. Beside a PNG file,
            the function writes an SVG file with the same name. Folders are created, existing files replaced.
        training: array or tensor `[n, 2]`, or a list of pairs: the number of tokens seen so far, not in millions, and
            the bits per byte of the batch. Drawn raw and as an exponential moving average over about n / 60 batches.
            May be empty.
        held_out: `[m, 2]`: the number of tokens seen so far, and the bits per byte of the held-out text. May be empty.
        references: maps the name of another method to its bits per byte, drawn as a horizontal line. None by default.
        title: heading of the figure.

    Returns:
        `path`.

    Raises:
        ArgumentError: `training` or `held_out` has another shape; `references` is not a mapping; a value, also of
            `references`, is not a finite number; or matplotlib does not support the suffix of `path`.

    Example:
        >>> from kalmix.analysis import plots
        >>> training, held_out = [(1e5, 4.0), (2e5, 3.1), (3e5, 2.9)], [(3e5, 3.0)]
        >>> plots.loss_curve("loss.png", training, held_out, references={"gzip": 2.7})
        'loss.png'
    """
    (seen, bits), (judged, score) = _read_pairs("training", training), _read_pairs("held_out", held_out)
    references = {} if references is None else references
    if not isinstance(references, Mapping):
        expected = "a mapping from names to bits per byte"
        raise ArgumentError("references", got=f"a {type(references).__name__}", expected=expected)
    names = list(references)
    rivals = read_numbers("references", list(references.values()), ("names", len(names)))
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
        for name, level in zip(names, rivals, strict=True):
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
        levels = [*rivals, *score[-1:], *_smooth(bits)[-1:]]
        if levels:
            high = float(np.quantile(bits, 0.97)) if len(bits) else max(levels)
            axes.set_ylim(min(*levels, *levels) - 0.15, max(high, max(levels) + 0.4))
        axes.set(title=title, xlabel="million tokens seen", ylabel="bits per byte")
        axes.grid(axis="x", visible=False)
        axes.legend(labelcolor=INK)
    return path


def _read_pairs(name: str, values: ArrayLike) -> np.ndarray:
    """Return pairs `[n, 2]` as an array `[2, n]`."""
    empty = isinstance(values, Sized) and not len(values)
    return read_numbers(name, np.empty((0, 2)) if empty else values, ("n", None), ("columns", 2)).T


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return a bias-corrected exponential moving average over about a sixtieth of the values."""
    keep, total, weight, out = 1 - 1 / max(1.0, len(values) / 60), 0.0, 0.0, np.empty_like(values)
    for index, value in enumerate(values):
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out[index] = total / weight
    return out
