"""Console that records its tables, and a writer of tables as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kalmix.files import write_text

DEFAULT_WIDTH = 160  # columns without a terminal


class RecordingConsole(Console):
    """Console that prints to the output of `console` and stores all tables."""

    def __init__(self, console: Console) -> None:
        super().__init__(file=console.file, width=None if console.is_terminal else DEFAULT_WIDTH, highlight=False)
        self.tables: list[Table] = []

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects, and store the tables among them."""
        super().print(*objects, **options)
        self.tables += [table for table in objects if isinstance(table, Table)]


def write(parts: Mapping[str, Sequence[Table]], path: Path) -> Path:
    """Write tables as Markdown, each under its title and above its caption; return the path.

    Args:
        parts: tables by section heading.
        path: file to write.
    """
    sections = [f"# {name}\n\n" + "".join(map(_markdown, tables)) for name, tables in parts.items() if tables]
    write_text(path, "".join(sections))
    return path


def _markdown(table: Table) -> str:
    title, caption = (Text.from_markup(str(text)).plain if text else "" for text in (table.title, table.caption))
    table.title = table.caption = None
    table.box = box.MARKDOWN
    plain = StringIO()
    Console(file=plain, width=10 * DEFAULT_WIDTH, color_system=None).print(table)
    lines = [line.rstrip() for line in plain.getvalue().splitlines() if line.strip()]
    return "\n".join([f"## {title}", "", *lines, "", *([caption, ""] if caption else []), ""])
