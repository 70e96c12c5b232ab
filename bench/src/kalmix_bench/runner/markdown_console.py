"""A console whose tables can be written down as Markdown."""

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

DEFAULT_WIDTH = 160  # columns, where there is no terminal to fit


class RecordingConsole(Console):
    """Prints where `console` does, and keeps the tables."""

    def __init__(self, console: Console) -> None:
        super().__init__(file=console.file, width=None if console.is_terminal else DEFAULT_WIDTH, highlight=False)
        self.tables: list[Table] = []

    def print(self, *objects: Any, **options: Any) -> None:
        """As a console does."""
        super().print(*objects, **options)
        self.tables += [table for table in objects if isinstance(table, Table)]


def write(parts: Mapping[str, Sequence[Table]], path: Path) -> Path:
    """Tables as Markdown, each under its title and above its caption, those of a part under its name."""
    told = [f"# {name}\n\n" + "".join(map(_markdown, tables)) for name, tables in parts.items() if tables]
    write_text(path, "".join(told))
    return path


def _markdown(table: Table) -> str:
    title, caption = (Text.from_markup(str(text)).plain if text else "" for text in (table.title, table.caption))
    table.title = table.caption = None
    table.box = box.MARKDOWN
    plain = StringIO()
    Console(file=plain, width=10 * DEFAULT_WIDTH, color_system=None).print(table)
    lines = [line.rstrip() for line in plain.getvalue().splitlines() if line.strip()]
    return "\n".join([f"## {title}", "", *lines, "", *([caption, ""] if caption else []), ""])
