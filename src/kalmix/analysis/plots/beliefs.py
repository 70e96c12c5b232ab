"""Figures of variances, write gains and surprisal over a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import LogLocator
from numpy.typing import ArrayLike
from torch import Tensor

from kalmix.analysis.plots.arguments import check_texts, read_numbers
from kalmix.analysis.plots.style import COLOURS, GAIN, INK, MUTED, VARIANCE, label_tokens, picture, width_for
from kalmix.errors import ArgumentError

TINY = 1e-30  # replaces zero on logarithmic scales


def posterior_variance(
    path: str | PathLike[str],
    variance: Iterable[ArrayLike],
    tokens: Sequence[str],
    names: Sequence[str],
    *,
    marks: Mapping[str, ArrayLike] | None = None,
    title: str = "",
) -> str | PathLike[str]:
    """Draw the variance of each layer's read-out over a passage, one line per layer.

    Args:
        path: file to write, with the suffix .png, .pdf or .svg, or another that matplotlib supports. Beside a PNG file,
            the function writes an SVG file with the same name. Folders are created, existing files replaced.
        variance: one array or tensor per layer: `[tokens]`; or `[tokens, columns]`, drawn as the mean and a band from
            the 25% to the 75% quantile of the columns. Values are >= 0, on a logarithmic axis; NaN leaves a gap.
        tokens: text of each token, at least one. Tokens are labelled if there are at most 128.
        names: name of each layer, at least one.
        marks: maps a name, shown in the legend, to a mask `[tokens]` of booleans. Ticks below the lines mark the tokens
            where it is True. None by default.
        title: heading of the figure. Default: "Posterior variance of the read-out".

    Returns:
        `path`.

    Raises:
        ArgumentError: `variance` does not have one array per name, with one row per token; a variance is negative or
            infinite; a mask has another shape; a token or a name is not a string; or matplotlib does not support the
            suffix of `path`.

    Example:
        >>> from kalmix.analysis import plots
        >>> plots.posterior_variance("variance.png", [[1.0, 0.6, 0.5]], ["a", "b", "c"], ["layer 0"])
        'variance.png'
    """
    check_texts("tokens", tokens)
    check_texts("names", names)
    rows, masks = _read_variances(variance, names, len(tokens)), {}
    for name, mask in (marks or {}).items():
        masks[name] = read_numbers("marks", mask, ("tokens", len(tokens)))
    with picture(path, (width_for(len(tokens)), 4.2)) as (figure, (axes,)):
        for row, name in zip(rows, names, strict=True):
            line = row if row.ndim == 1 else row.mean(-1)
            (curve,) = axes.plot(line, label=name, drawstyle="steps-mid")
            if row.ndim == 2:
                low, high = np.quantile(row.clip(min=TINY), (0.25, 0.75), axis=-1)
                axes.fill_between(range(len(line)), low, high, step="mid", alpha=0.15, color=curve.get_color())
        axes.set(title=title or "Posterior variance of the read-out", ylabel="variance", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.margins(y=0.05 + 0.04 * len(masks))  # room for the marks
        axes.set_xlim(-0.5, len(tokens) - 0.5)
        axes.grid(axis="x", visible=False)
        for level, (name, mask) in enumerate(masks.items()):
            colour = COLOURS[(len(names) + level) % len(COLOURS)]
            at = np.flatnonzero(mask)
            ticks = {"linestyle": "none", "markersize": 9, "markeredgewidth": 1.5}
            heights = np.full(len(at), 0.04 * level + 0.02)
            axes.plot(at, heights, "|", color=colour, label=name, transform=axes.get_xaxis_transform(), **ticks)
        label_tokens(axes, tokens)
        axes.set_xlabel("token")
        figure.legend(loc="outside right upper", labelcolor=INK)
    return path


def _read_variances(variance: Iterable[ArrayLike], names: Sequence[str], tokens: int) -> list[np.ndarray]:
    """Return the variances of each layer, `[tokens]` or `[tokens, columns]`."""
    rows = list(variance)
    if len(rows) != len(names):
        raise ArgumentError("variance", problem=f"has {len(rows)} arrays", expected=f"{len(names)}, one per name")
    found = []
    for row in rows:
        shape = np.shape(row) if not isinstance(row, Tensor) else row.shape
        columns = [("columns", None)] if len(shape) > 1 else []
        found.append(read_numbers("variance", row, ("tokens", tokens), *columns, positive=True, nan=True))
    return found


def beliefs(
    path: str | PathLike[str],
    tokens: Sequence[str],
    surprisal: ArrayLike,
    variance: ArrayLike,
    gain: ArrayLike,
    names: Sequence[str],
) -> str | PathLike[str]:
    """Draw the surprisal of each token, a heat map of variances and a heat map of write gains.

    Heat maps have one row per layer and a logarithmic colour scale, on which 0 is drawn as 1e-30. A variance is divided
    by the median of its layer.

    Args:
        path: file to write, with the suffix .png, .pdf or .svg, or another that matplotlib supports. Beside a PNG file,
            the function writes an SVG file with the same name. Folders are created, existing files replaced.
        tokens: text of each token, at least one. Tokens are labelled if there are at most 128.
        surprisal: array or tensor `[tokens]`, in bits: -log2 of each token's probability. NaN, for a token without a
            probability such as the first, draws no bar.
        variance: `[layers, tokens]`, predictive variance of each layer's output, >= 0.
        gain: `[layers, tokens]`, between 0 and 1: the weight with which the layer writes the token to its memory, as
            `Mixer.write_gain` returns it. The range is not checked.
        names: name of each layer, at least one.

    Returns:
        `path`.

    Raises:
        ArgumentError: an array has another shape or is infinite; `variance` or `gain` has NaN; a variance is negative;
            a token or a name is not a string; or matplotlib does not support the suffix of `path`.

    Example:
        >>> from kalmix.analysis import plots
        >>> variance, gain = [[1.0, 0.6, 0.5]], [[0.9, 0.4, 0.2]]  # one layer
        >>> plots.beliefs("beliefs.png", ["a", "b", "c"], [float("nan"), 3.0, 1.5], variance, gain, ["layer 0"])
        'beliefs.png'
    """
    check_texts("tokens", tokens)
    check_texts("names", names)
    columns, sizes = ("tokens", len(tokens)), (("names", len(names)), ("tokens", len(tokens)))
    bits = read_numbers("surprisal", surprisal, columns, nan=True)
    spread, written = read_numbers("variance", variance, *sizes, positive=True), read_numbers("gain", gain, *sizes)
    height = 0.32 * max(2, len(names))
    size = (width_for(len(tokens)), 3.2 + 2 * height)
    with picture(path, size, rows=3, sharex=True, height_ratios=[1.6, height, height]) as (_, (top, middle, bottom)):
        top.bar(range(len(bits)), np.nan_to_num(bits), width=0.8, color=COLOURS[0])
        top.set(title="Surprisal", ylabel="bits")
        top.grid(axis="x", visible=False)
        top.tick_params(axis="x", length=0)
        # Layers differ in scale, so each row is relative to its median.
        relative = spread / np.median(spread, axis=1, keepdims=True).clip(min=TINY)
        _heat_map(middle, relative, names, VARIANCE, "{:.2g}\N{MULTIPLICATION SIGN}")
        middle.set_title("Predictive variance, relative to the layer's median")
        _heat_map(bottom, written, names, GAIN, "{:.2g}")
        bottom.set_title("Write gain")
        bottom.set_xlim(-0.5, len(tokens) - 0.5)
        label_tokens(bottom, tokens)
    return path


def _heat_map(axes: Axes, values: np.ndarray, names: Sequence[str], colours: str, form: str) -> None:
    """Draw a heat map with one row per layer and a logarithmic colour scale, which resolves decaying values."""
    low, high = np.quantile(values.clip(min=TINY), (0.02, 0.98))
    norm = LogNorm(float(low), float(max(high, 1.01 * low)))
    image = axes.imshow(values.clip(min=TINY), aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03, aspect=10)
    ticks = [float(tick) for tick in np.geomspace(low, max(high, 1.01 * low), 3)]
    bar.set_ticks(ticks, labels=[form.format(tick) for tick in ticks])
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, colors=MUTED)
    bar.ax.minorticks_off()
