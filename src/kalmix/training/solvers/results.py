"""Finished studies as JSON lines, and running those that are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from kalmix.tasks.solvers.convergence import Tell
from kalmix.training.lines import Lines, Row
from kalmix.training.provenance import provenance
from kalmix.training.solvers.protocol import STUDIES, Cell

Follow = Callable[[str, int], Tell]


class Results(Lines):
    """Each row a cell with what it found."""

    def find(self, cell: Cell) -> Row | None:
        """The row of a cell; of several, the last."""
        found, asked = None, cell.written()
        for row in self.read():
            if asked.items() <= row.items():
                found = row
        return found


def run(
    cells: Iterable[Cell],
    results: Results,
    device: torch.device,
    follow: Follow = lambda study, seed: lambda done, told: None,
) -> list[Row]:
    """Run the cells that `results` lacks and give the rows of all that were asked, in their order.

    Args:
        follow: called with study and seed as each begins; what it returns is told the part done and what comes next.
    """
    rows = []
    for cell in cells:
        row = results.find(cell)
        if row is None:
            began, tell = time.monotonic(), follow(cell.study, cell.seed)
            found = STUDIES[cell.study](cell.setting, cell.seed, device, tell)
            seconds = round(time.monotonic() - began, 1)
            tell(1.0, f"{seconds:g} s")
            row = {**cell.written(), "seconds": seconds, **provenance(device), "found": found}
            results.add([row])
        rows.append(row)
    return rows
