"""Figures of attention maps: a filter's read-outs as lower-triangular matrices over tokens."""

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

from kalmix.analysis.plots.arguments import check_texts, read_maps
from kalmix.analysis.plots.style import LABELLED, MUTED, SIGN, WEIGHT, picture, printable


def attention_maps(
    path: str | PathLike[str], weights: ArrayLike, tokens: Sequence[str], names: Sequence[str], *, title: str = ""
) -> str | PathLike[str]:
    """Draw one attention map per layer.

    Row i of a map shows the read-out at token i; column j shows the share of the value of token j in it. The function
    divides each row by its sum. Rows of zeros remain zero. The colour scale is that of the square root, and the same
    for all layers. Tokens are labelled if there are at most 128.

    Args:
        path: file to write, with the suffix .png, .pdf or .svg, or another that matplotlib supports. Beside a PNG file,
            the function writes an SVG file with the same name. Folders are created, existing files replaced.
        weights: array or tensor `[layers, tokens, tokens]`, finite, >= 0, zero above the diagonal. Average or select
            heads before the call.
        tokens: text of each token, at least one.
        names: name of each layer, at least one.
        title: heading of the figure; none if it is empty.

    Returns:
        `path`.

    Raises:
        ArgumentError: `weights` has another shape, a negative entry, NaN or infinity, or an entry above the diagonal;
            a token or a name is not a string; or matplotlib does not support the suffix of `path`.

    Example:
        >>> from kalmix.analysis import plots
        >>> weights = torch.ones(2, 3, 3).tril()  # 2 layers, 3 tokens
        >>> plots.attention_maps("maps.png", weights, ["a", "b", "c"], ["layer 0", "layer 1"])
        'maps.png'
    """
    check_texts("tokens", tokens)
    check_texts("names", names)
    maps = read_maps(weights, names, tokens, positive=True)
    maps = maps / maps.sum(-1, keepdims=True).clip(min=np.finfo(float).tiny)
    norm = PowerNorm(0.5, 0, float(np.quantile(maps, 0.995)))
    with _panels(path, tokens, names, title) as (figure, panels):
        for panel, values in zip(panels, maps, strict=True):
            panel.imshow(_causal(values), cmap=WEIGHT, norm=norm)
        _bar(figure, ScalarMappable(norm, WEIGHT), panels, "share of the read-out", aspect=40)
    return path


def channel_maps(
    path: str | PathLike[str], weights: ArrayLike, tokens: Sequence[str], names: Sequence[str], *, title: str = ""
) -> str | PathLike[str]:
    """Draw one map per channel or head: the signed weight of a token's value (column) in a read-out (row).

    Weights are drawn as they are; rows are not divided by their sums. Each channel has its own colour scale, that of
    sign(w) sqrt(|w|), which keeps small weights visible. Tokens are labelled if there are at most 128.

    Args:
        path: file to write, with the suffix .png, .pdf or .svg, or another that matplotlib supports. Beside a PNG file,
            the function writes an SVG file with the same name. Folders are created, existing files replaced.
        weights: array or tensor `[channels, tokens, tokens]`, real, finite, zero above the diagonal.
        tokens: text of each token, at least one.
        names: name of each channel, at least one.
        title: heading of the figure; none if it is empty.

    Returns:
        `path`.

    Raises:
        ArgumentError: `weights` has another shape, NaN or infinity, or an entry above the diagonal; a token or a name
            is not a string; or matplotlib does not support the suffix of `path`.

    Example:
        >>> from kalmix.analysis import plots
        >>> weights = torch.randn(2, 3, 3).tril()  # 2 channels, 3 tokens
        >>> plots.channel_maps("channels.png", weights, ["a", "b", "c"], ["channel 0", "channel 1"])
        'channels.png'
    """
    check_texts("tokens", tokens)
    check_texts("names", names)
    maps = read_maps(weights, names, tokens)
    with _panels(path, tokens, names, title) as (figure, panels):
        for panel, values in zip(panels, maps, strict=True):
            image = panel.imshow(_causal(values), cmap=SIGN, norm=_signed(values))
            _bar(figure, image, panel, "weight", aspect=25)
    return path


@contextmanager
def _panels(
    path: str | PathLike[str], tokens: Sequence[str], names: Sequence[str], title: str
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure with one square panel per name, up to three in a row; label tokens if there are few enough."""
    columns = 2 if len(names) == 4 else min(3, len(names))
    rows = -(-len(names) // columns)
    side = 5.2 if len(tokens) <= LABELLED else 4.2
    with picture(path, (side * columns + 0.6, side * rows + 0.5), rows, columns) as (figure, axes):
        yield figure, axes[: len(names)]
        for panel, name in zip(axes, names, strict=False):
            panel.set_title(name)
            panel.grid(visible=False)
            panel.tick_params(length=0)
            panel.set(xlabel="written at", ylabel="read at")
            if len(tokens) <= LABELLED:
                labels = [printable(token) for token in tokens]
                count = max(1, sum(map(bool, labels)))  # an empty label takes no room
                small: Any = {"family": "monospace", "fontsize": float(np.clip(300 / count, 3.5, 8))}
                panel.set_xticks(range(len(tokens)), labels, rotation=90, **small)
                panel.set_yticks(range(len(tokens)), labels, **small)
        for panel in axes[len(names) :]:
            panel.set_visible(False)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)


def _signed(values: np.ndarray) -> Normalize:
    """Return a symmetric square-root colour scale that saturates at the 99.5% quantile."""
    top = float(np.quantile(np.abs(values[values != 0]), 0.995)) if values.any() else 1.0
    return FuncNorm((lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * np.square(x)), -top, top)


def _bar(figure: Figure, image: ScalarMappable, axes: Axes | list[Axes], label: str, *, aspect: float) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.025, aspect=aspect, label=label)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, colors=MUTED)


def _causal(values: np.ndarray) -> np.ndarray:
    return np.ma.masked_where(np.triu(np.ones_like(values, dtype=bool), 1), values)
