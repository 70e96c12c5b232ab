"""Cells, the units of an experiment that are run once, and the JSON lines file of their results."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from kalmix.errors import ArgumentError, FileError
from kalmix.files import check_format, disk_errors, read_text, sync

Row = dict[str, Any]


class Cell(Protocol):
    """Unit of an experiment that is run once: hashable, with a name (`str`) and a JSON-compatible form."""

    def to_dict(self) -> Row:
        """Return everything that defines the cell. Cells with equal values are the same cell."""
        ...


class Results:
    """File of finished cells, one JSON object per line: the cell, where it ran, and its results.

    Several processes may append at once. Lines damaged by a crash or a power cut (truncated, blank, or of NULs) are
    skipped
    with a warning, and the next row starts on a new line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Iterator[Row]:
        """Yield all rows, oldest first; none if there is no file.

        Raises:
            ArgumentError: the file has other content, or rows of a newer version.
        """
        try:
            text = read_text(self.path) if self.path.exists() else ""
        except FileError:
            raise self._foreign("which is not UTF-8 text") from None
        damaged = []
        for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
            line = line.strip("\0\r\t ")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                if line and not line.startswith("{"):
                    raise self._foreign(f"whose line {number} is not JSON") from None
                damaged.append(number)
                continue
            if not isinstance(row, dict) or not {"seconds", "versions"} <= row.keys():
                raise self._foreign(f"whose line {number} is not a result")
            check_format(row, self.path)
            yield row
        if damaged:
            lines = f"line{'' if len(damaged) == 1 else 's'} {', '.join(map(str, damaged))}"
            warnings.warn(f"skipping {lines} of {self.path}: blank, or cut off while written", stacklevel=2)

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
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with FileLock(self._beside("results")), disk_errors(self.path), self.path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            text = (b"" if file.read(1) in (b"", b"\n") else b"\n") + text
            try:
                while text:
                    text = text[file.write(text) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
        sync(self.path.parent)

    def claim(self, cell: Cell) -> FileLock:
        """Return the lock that a process holds while it runs a cell, so that no other does. It is freed if the process
        dies.
        """
        return FileLock(self._beside(digest(cell)))

    def _beside(self, name: str) -> Path:
        folder = self.path.parent / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.lock"

    def _foreign(self, fault: str) -> ArgumentError:
        hint = "Choose another output folder"
        return ArgumentError(
            "results", got=f"{str(self.path)!r}, {fault}", expected="a file that `kalmix bench` wrote", hint=hint
        )


def digest(cell: Cell) -> str:
    """Return a short hash that names files of a cell."""
    return hashlib.sha256(cell_key(cell.to_dict()).encode()).hexdigest()[:16]


def cell_key(values: Row) -> str:
    """Return the text by which cells are compared; a tuple equals the list that JSON makes of it."""
    return json.dumps(values, sort_keys=True)
