"""Scores that papers print for the tasks of a suite."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple


class PrintedTable(NamedTuple):
    """Table of a paper.

    Attributes:
        paper: title of the paper, shortened.
        suite: suite with the columns of the table.
        table: its name in the paper, such as "Table 4".
        note: training of the models.
        columns: headings; the last is the average.
        rows: model, and its scores in percent.
    """

    paper: str
    suite: str
    table: str
    note: str
    columns: list[str]
    rows: list[tuple[str, list[float]]]


@cache
def printed_tables(suite: str) -> tuple[PrintedTable, ...]:
    """Return the tables that papers print for a suite; empty if there are none."""
    found = tomllib.loads((Path(__file__).parent / "printed_figures.toml").read_text(encoding="utf-8"))["tables"]
    tables = [PrintedTable(**{**table, "rows": [(row[0], row[1:]) for row in table["rows"]]}) for table in found]
    return tuple(table for table in tables if table.suite == suite)
