"""Files of cells to run: JSON lines, each with the keys of a cell in its row of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kalmix.errors import ArgumentError, FileError
from kalmix.files import read_text, write_text
from kalmix_bench.runner.cells import Cell, Row, digest
from kalmix_bench.runner.experiment import CellT


def write(cells: Iterable[Cell], path: Path) -> None:
    """Write cells to a file, one per line."""
    write_text(path, "".join(json.dumps(cell.to_dict()) + "\n" for cell in cells))


def read(path: Path, cell_of: Callable[[Row], CellT]) -> list[CellT]:
    """Return the distinct cells of a file in order; blank lines are skipped.

    Args:
        path: path of the file.
        cell_of: function from a line's object to a cell.

    Raises:
        FileError: the file cannot be read, has no cell, or a line is not a cell; names the line and the reason.
    """
    cells: dict[str, CellT] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                cell = cell_of(_object(line))
            except ArgumentError as error:
                raise FileError(f"{path.name}, line {number}: {error}") from None
            cells.setdefault(digest(cell), cell)
    if not cells:
        raise FileError(f"{path.name} has no cell; expected one per line, as `kalmix bench mad --write` writes them")
    return list(cells.values())


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArgumentError("cell", problem=f"is not JSON ({error})", expected="a JSON object") from None
    if not isinstance(value, dict):
        raise ArgumentError("cell", got=f"a {type(value).__name__}", expected="a JSON object")
    return value
