"""Results as JSON lines, one a finished piece of work: appended as they come, read back after a crash."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Lines:
    """Rows in a file, one a line. A line that a crash cut off is no row, and the next one starts behind it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Iterator[Row]:
        """All rows, oldest first; none where there is no file."""
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows behind those there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("" if whole else "\n") + "".join(json.dumps(row) + "\n" for row in rows))
