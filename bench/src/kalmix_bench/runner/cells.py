"""Cells, the units of an experiment that are run once, and the JSON lines file of their results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from kalmix.files import check_format
from kalmix_bench.runner.json_lines import append_rows, foreign_file, read_lines

Row = dict[str, Any]


class Cell(Protocol):
    """Unit of an experiment that is run once: hashable, with a name (`str`) and a JSON-compatible form."""

    def to_dict(self) -> Row:
        """Return everything that defines the cell. Cells with equal values are the same cell."""
        ...


class Results:
    """File of finished cells, one JSON object per line: the cell, where it ran, and its results.

    Several processes may append at once. Lines damaged by a crash or a power cut (truncated, blank, or of NULs) are
    skipped with a warning, and the next row starts on a new line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Iterator[Row]:
        """Yield all rows, oldest first; none if there is no file.

        Raises:
            ArgumentError: the file has other content, or rows of a newer version.
        """
        for number, row in read_lines(self.path):
            if not isinstance(row, dict) or not {"seconds", "versions"} <= row.keys():
                raise foreign_file(self.path, f"whose line {number} is not a result")
            check_format(row, self.path)
            yield row

    def rows(self, cells: Iterable[Any]) -> dict[Any, Row]:
        """Return the rows of the cells that are in the file, in the order of `cells`; the last row if there are
        several.
        """
        values_by_cell = {cell: cell.to_dict() for cell in cells}
        names = {frozenset(values) for values in values_by_cell.values()}
        rows_by_key: dict[str, Row] = {}
        for row in self.read():
            rows_by_key |= {
                cell_key({name: row[name] for name in these}): row for these in names if these <= row.keys()
            }
        cell_keys = {cell: cell_key(values) for cell, values in values_by_cell.items()}
        return {cell: rows_by_key[key] for cell, key in cell_keys.items() if key in rows_by_key}

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows and wait until they are on disk. If they cannot all be written, none is.

        Raises:
            OSError: the disk is full; names the file.
        """
        with FileLock(self._beside("results")):
            append_rows(self.path, rows)

    def claim(self, cell: Cell) -> FileLock:
        """Return the lock that a process holds while it runs a cell, so that no other does. It is freed if the process
        dies.
        """
        return FileLock(self._beside(digest(cell)))

    def _beside(self, name: str) -> Path:
        folder = self.path.parent / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.lock"


def digest(cell: Cell) -> str:
    """Return a short hash that names files of a cell."""
    return hashlib.sha256(cell_key(cell.to_dict()).encode()).hexdigest()[:16]


def cell_key(values: Row) -> str:
    """Return the text by which cells are compared; a tuple equals the list that JSON makes of it."""
    return json.dumps(values, sort_keys=True)
