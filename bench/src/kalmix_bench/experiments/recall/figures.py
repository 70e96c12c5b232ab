"""Heat maps of scores by length and by a second quantity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from kalmix.analysis.plots.style import INK, picture


@dataclass(frozen=True)
class HeatMap:
    """Scores in percent by two quantities.

    Attributes:
        x_label: name of the second quantity.
        scores: scores by a value of each quantity; missing ones stay white.
    """

    x_label: str
    scores: Mapping[tuple[Any, Any], float]


def heat_maps(
    path: str | PathLike[str], maps: Mapping[str, HeatMap], *, y_label: str, columns: int = 6
) -> str | PathLike[str]:
    """Draw maps row by row, each with the values that it has, in order; return the path."""
    columns = min(columns, len(maps))
    lines = -(-len(maps) // columns)
    with picture(path, (0.8 + 2.2 * columns, 0.3 + 2.6 * lines), rows=lines, columns=columns) as (figure, axes):
        for area in axes[len(maps) :]:
            area.set_axis_off()
        image = None
        for index, (area, (name, values)) in enumerate(zip(axes, maps.items(), strict=False)):
            y, x = (sorted({key[axis] for key in values.scores}) for axis in (0, 1))
            grid = np.array([[values.scores.get((row, column), np.nan) for column in x] for row in y])
            image = area.imshow(grid, cmap="viridis", vmin=0, vmax=100, aspect="auto")
            for (row, column), value in np.ndenumerate(grid):
                if np.isfinite(value):
                    colour = "white" if value < 60 else INK
                    area.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=7)
            area.set_xticks(range(len(x)), list(map(str, x)))
            area.set_yticks(range(len(y)), list(map(str, y)))
            area.set(title=name, xlabel=values.x_label, ylabel="" if index % columns else y_label)
            area.grid(visible=False)
        if image is not None:
            figure.colorbar(image, ax=axes, shrink=0.9, label="score (%)")
    return path
