"""Finished studies as JSON lines, and running those that are missing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from kalmix.tasks.solvers.convergence import Tell
from kalmix.training.provenance import provenance
from kalmix.training.solvers.protocol import STUDIES, Cell

Row = dict[str, Any]
Follow = Callable[[str, int], Tell]


class Results:
    """Rows in a file, one a line: each a cell with what it found. A line that a crash cut off is no result."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, cell: Cell) -> Row | None:
        """The row of a cell; of several, the last."""
        found, asked = None, cell.written()
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and asked.items() <= row.items():
                found = row
        return found

    def add(self, row: Row) -> None:
        """Write a row behind those there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("" if whole else "\n") + json.dumps(row) + "\n")


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
            results.add(row)
        rows.append(row)
    return rows
