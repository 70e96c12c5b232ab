"""Attention maps: a filter seen as a lower-triangular matrix over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from numpy.typing import ArrayLike

from kalmix.plots.style import LABELLED, MUTED, WEIGHT, picture, visible


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
    columns = min(3, len(maps))
    rows = -(-len(maps) // columns)
    side = 5.2 if len(tokens) <= LABELLED else 4.2
    with picture(path, (side * columns + 0.6, side * rows + 0.5), rows, columns) as (figure, axes):
        norm = PowerNorm(0.5, 0, float(np.quantile(maps, 0.995)))
        for panel, values, name in zip(axes, maps, names, strict=False):
            panel.imshow(_causal(values), cmap=WEIGHT, norm=norm)
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
        for panel in axes[len(maps) :]:
            panel.set_visible(False)
        bar = figure.colorbar(ScalarMappable(norm, WEIGHT), ax=axes, pad=0.01, fraction=0.025, aspect=40)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7, colors=MUTED)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    return path


def _causal(values: np.ndarray) -> np.ndarray:
    return np.ma.masked_where(np.triu(np.ones_like(values, dtype=bool), 1), values)
