"""Cells, the pieces of an experiment that are run once, and their results as JSON lines."""

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
    """What is run once: a value that can be hashed, names itself by `str` and writes itself."""

    def to_dict(self) -> Row:
        """All that makes it what it is, as its line holds it; cells that write the same are the same."""
        ...


class Results:
    """Finished cells in a file, one a line, behind what they write: where they were run, and what was found.

    Several processes may add to it at once. Lines that a crash or a power cut damaged (cut off, blank, or of NULs) are
    skipped with a warning, and the next row starts a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Iterator[Row]:
        """All rows, oldest first; none where there is no file.

        Raises:
            ArgumentError: the file holds something else, or rows of a newer version.
        """
        try:
            text = read_text(self.path) if self.path.exists() else ""
        except FileError:
            raise self._foreign("which is no text") from None
        damaged = []
        for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
            line = line.strip("\0\r\t ")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                if line and not line.startswith("{"):
                    raise self._foreign(f"whose line {number} is no JSON") from None
                damaged.append(number)
                continue
            if not isinstance(row, dict) or not {"seconds", "versions"} <= row.keys():
                raise self._foreign(f"whose line {number} is no result")
            check_format(row, self.path)
            yield row
        if damaged:
            lines = f"line{'' if len(damaged) == 1 else 's'} {', '.join(map(str, damaged))}"
            warnings.warn(f"skipping {lines} of {self.path}: blank, or cut off while written", stacklevel=2)

    def rows(self, cells: Iterable[Any]) -> dict[Any, Row]:
        """The rows of those cells that are there, in their order; of several, the last. One reading, however many."""
        written = {cell: cell.to_dict() for cell in cells}
        names = {frozenset(what) for what in written.values()}
        there: dict[str, Row] = {}
        for row in self.read():
            there |= {cell_key({name: row[name] for name in these}): row for these in names if these <= row.keys()}
        told = {cell: cell_key(what) for cell, what in written.items()}
        return {cell: there[name] for cell, name in told.items() if name in there}

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows behind those there, and wait until they are on the disk. If they cannot be written, none is.

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
        """What a process holds while it runs a cell, so that no other does; a process that dies gives it back."""
        return FileLock(self._beside(digest(cell)))

    def _beside(self, name: str) -> Path:
        folder = self.path.parent / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.lock"

    def _foreign(self, fault: str) -> ArgumentError:
        return ArgumentError("results", got=f"{str(self.path)!r}, {fault}", expected="a file that `kalmix bench` wrote")


def digest(cell: Cell) -> str:
    """A name for files that belong to a cell."""
    return hashlib.sha256(cell_key(cell.to_dict()).encode()).hexdigest()[:16]


def cell_key(written: Row) -> str:
    """What cells are compared by: a tuple is what it is when read back."""
    return json.dumps(written, sort_keys=True)
