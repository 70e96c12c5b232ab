"""Files of cells to run: JSON lines, each a cell as it stands in its row of results."""

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
    """Write cells to a file, one a line."""
    write_text(path, "".join(json.dumps(cell.to_dict()) + "\n" for cell in cells))


def read(path: Path, cell_of: Callable[[Row], CellT]) -> list[CellT]:
    """Return the cells of a file, in their order; equal ones once, blank lines left out.

    Args:
        path: of the file.
        cell_of: makes a cell of the object in a line.

    Raises:
        FileError: it cannot be read, has no cell, or a line is none; names the line and what is wrong with it.
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
        raise FileError(f"{path.name} has no cell; expected one a line, as `--write` of `kalmix bench mad` writes them")
    return list(cells.values())


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArgumentError("cell", got=f"no JSON ({error})", expected="an object of JSON") from None
    if not isinstance(found, dict):
        raise ArgumentError("cell", got=f"a {type(found).__name__}", expected="an object of JSON")
    return found
