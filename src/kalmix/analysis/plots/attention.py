"""Attention maps: a filter seen as a lower-triangular matrix over tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import FuncNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from kalmix.analysis.plots.style import LABELLED, MUTED, SIGN, WEIGHT, picture, visible


def attention_maps(
    path: str | PathLike[str], weights: ArrayLike, tokens: Sequence[str], names: Sequence[str], *, title: str = ""
) -> str | PathLike[str]:
    """Draw one map a layer: how much each token's read-out (row) owes to each token's value (column).

    Args:
        path: where to write.
        weights: `[layers, tokens, tokens]`, >= 0, zero above the diagonal. Each row is shown as parts of its sum.
        tokens: the text of each token.
        names: the name of each layer.
        title: the heading.
    """
    maps = np.asarray(weights, float)
    maps = maps / maps.sum(-1, keepdims=True).clip(min=np.finfo(float).tiny)
    norm = PowerNorm(0.5, 0, float(np.quantile(maps, 0.995)))
    with _panels(path, tokens, names, title) as (figure, panels):
        for panel, values in zip(panels, maps, strict=True):
            panel.imshow(_causal(values), cmap=WEIGHT, norm=norm)
        _bar(figure, ScalarMappable(norm, WEIGHT), panels, aspect=40)
    return path


def channel_maps(
    path: str | PathLike[str], weights: ArrayLike, tokens: Sequence[str], names: Sequence[str], *, title: str = ""
) -> str | PathLike[str]:
    """Draw one map a channel, or a head: what a token's value (column) counts for in a read-out (row), and its sign.

    Args:
        path: where to write.
        weights: `[channels, tokens, tokens]`, zero above the diagonal. Each channel is shown on its own scale, that of
            the root of a weight's size, so that small ones are seen.
        tokens: the text of each token.
        names: the name of each channel.
        title: the heading.
    """
    with _panels(path, tokens, names, title) as (figure, panels):
        for panel, values in zip(panels, np.asarray(weights, float), strict=True):
            drawn = panel.imshow(_causal(values), cmap=SIGN, norm=_signed(values))
            _bar(figure, drawn, panel, aspect=25)
    return path


@contextmanager
def _panels(
    path: str | PathLike[str], tokens: Sequence[str], names: Sequence[str], title: str
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A square a name, two or three beside one another, with tokens at its sides where there is room for them."""
    columns = 2 if len(names) == 4 else min(3, len(names))
    rows = -(-len(names) // columns)
    side = 5.2 if len(tokens) <= LABELLED else 4.2
    with picture(path, (side * columns + 0.6, side * rows + 0.5), rows, columns) as (figure, axes):
        yield figure, axes[: len(names)]
        for panel, name in zip(axes, names, strict=False):
            panel.set_title(name)
            panel.grid(visible=False)
            panel.tick_params(length=0)
            if len(tokens) <= LABELLED:
                small: Any = {"family": "monospace", "fontsize": float(np.clip(300 / len(tokens), 3.5, 7))}
                labels = [visible(token) for token in tokens]
                panel.set_xticks(range(len(tokens)), labels, rotation=90, **small)
                panel.set_yticks(range(len(tokens)), labels, **small)
            else:
                panel.set(xlabel="written at", ylabel="read at")
        for panel in axes[len(names) :]:
            panel.set_visible(False)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)


def _signed(values: np.ndarray) -> Normalize:
    """Both signs alike, up to all but the few largest weights."""
    top = float(np.quantile(np.abs(values[values != 0]), 0.995)) if values.any() else 1.0
    return FuncNorm((lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * np.square(x)), -top, top)


def _bar(figure: Figure, drawn: ScalarMappable, axes: Axes | list[Axes], *, aspect: float) -> None:
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, fraction=0.025, aspect=aspect)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, colors=MUTED)


def _causal(values: np.ndarray) -> np.ndarray:
    return np.ma.masked_where(np.triu(np.ones_like(values, dtype=bool), 1), values)
