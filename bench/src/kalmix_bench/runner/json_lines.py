"""Files of JSON lines that programs append to, and that a kill or a power cut may have damaged."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kalmix.errors import ArgumentError, FileError
from kalmix.files import disk_errors, read_text, sync


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of the lines of a file; none if there is no file.

    Lines damaged by a crash or a power cut (truncated, blank, or of NULs) are skipped with a warning.

    Raises:
        ArgumentError: the file has other content.
    """
    try:
        text = read_text(path) if path.exists() else ""
    except FileError:
        raise foreign_file(path, "which is not UTF-8 text") from None
    damaged = []
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        line = line.strip("\0\r\t ")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if line and not line.startswith("{"):
                raise foreign_file(path, f"whose line {number} is not JSON") from None
            damaged.append(number)
            continue
        yield number, value
    if damaged:
        lines = f"line{'' if len(damaged) == 1 else 's'} {', '.join(map(str, damaged))}"
        warnings.warn(f"skipping {lines} of {path}: blank, or cut off while written", stacklevel=2)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, without damaged lines; none if there is no file.

    Raises:
        ArgumentError: the file has other content.
    """
    rows = []
    for number, value in read_lines(path):
        if not isinstance(value, dict):
            raise foreign_file(path, f"whose line {number} is not a result")
        rows.append(value)
    return rows


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows and wait until they are on disk. If they cannot all be written, none is.

    They start on a new line, also after a line that was cut off. Only one process may append at a time.

    Raises:
        OSError: the disk is full; names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with disk_errors(path), path.open("a+b", buffering=0) as file:
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
    sync(path.parent)


def foreign_file(path: Path, fault: str) -> ArgumentError:
    """Return the error for a file of results that has other content."""
    hint = "Choose another output folder"
    return ArgumentError(
        "results", got=f"{str(path)!r}, {fault}", expected="a file that `kalmix bench` wrote", hint=hint
    )
