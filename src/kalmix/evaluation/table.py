"""Tables of scores, beside the figures that papers print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kalmix.evaluation.printed_figures import printed_tables
from kalmix.evaluation.suites import SUITES

MISSING = "-"


class ScoreTable(NamedTuple):
    """Table as text.

    Attributes:
        title: text above it.
        columns: headings.
        rows: cells; the first is the name of the row.
        notes: lines below it.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [f"## {self.title}", "", _line(self.columns), _line(["---", *["---:"] * (len(self.columns) - 1)])]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", *self.notes, *[""] * bool(self.notes)])

    def text(self) -> str:
        """Return the table with aligned columns, for a terminal."""
        cells = [self.columns, *self.rows]
        widths = [max(len(row[n]) for row in cells) for n in range(len(self.columns))]
        lines = [
            "  ".join(x.rjust(w) if n else x.ljust(w) for n, (x, w) in enumerate(zip(row, widths, strict=True)))
            for row in cells
        ]
        return "\n".join([self.title, "", *lines, "", *self.notes, *[""] * bool(self.notes)])


def score_tables(suite: str, name: str, tasks: Mapping[str, Mapping[str, Any]]) -> list[ScoreTable]:
    """Return the tables of a suite.

    Args:
        suite: name of the suite.
        name: name of the model.
        tasks: records of finished units, as `Results.tasks`.
    """
    return _comparison(suite, name, tasks)


def _comparison(suite: str, name: str, tasks: Mapping[str, Mapping[str, Any]]) -> list[ScoreTable]:
    """Return a table with the model in the first row, and printed figures below."""
    columns = SUITES[suite].columns
    scores = [tasks[x.task]["scores"].get(x.metric) if x.task in tasks else None for x in columns]
    known = [100 * x for x in scores if x is not None]
    average = sum(known) / len(known) if len(known) == len(columns) else None
    cells = [_percent(None if x is None else 100 * x) for x in (*scores, None if average is None else average / 100)]
    rows, notes = [[name, *cells]], []
    for table in printed_tables(suite):
        label = f"{table.paper}, {table.table}"
        rows += [[f"{model} ({table.table})", *map(_percent, printed)] for model, printed in table.rows]
        notes.append(f"{label}: printed figures; {table.note}.")
    errors = [tasks[x.task]["stderr"].get(x.metric) for x in columns if x.task in tasks]
    if largest := max((x for x in errors if x is not None), default=0):
        notes.insert(0, f"Largest standard error of a score of {name}: {100 * largest:.2f}.")
    counts = {tasks[x.task]["rows"] for x in columns if x.task in tasks}
    if counts and max(counts) <= 500:
        notes.insert(0, f"Rows of each task: at most {max(counts)}.")
    headings = ["model", *(x.title for x in columns), "average"]
    return [ScoreTable(SUITES[suite].title, headings, rows, notes)]


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
