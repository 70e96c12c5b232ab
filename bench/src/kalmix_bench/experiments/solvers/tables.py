"""Helpers of the solver reports: selecting and averaging curves, and Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from kalmix_bench.runner.cells import Row

SHOWN = (5, 10, 15, 20, 25, 30, 40, 60)  # iterations of a table
FACTOR = 0.02  # the paper's default ridge, in figures that vary another quantity
Curve = dict[str, Any]


def merge_seeds(rows: Sequence[Row], name: str, over: Callable[[Any], float]) -> list[Curve]:
    """Merge the curves of all seeds, iteration by iteration, with the function `over`."""
    seeds = [row["found"]["curves"] for row in rows]
    return [
        {**of[0], name: [over(at) for at in zip(*(one[name] for one in of), strict=True)]}
        for of in zip(*seeds, strict=True)
    ]


def average_seeds(seeds: Sequence[Sequence[Curve]], names: Sequence[str]) -> list[Curve]:
    return [{**of[0], **{name: mean(one[name] for one in of) for name in names}} for of in zip(*seeds, strict=True)]


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def select(curves: Sequence[Curve], **values: Any) -> list[Curve]:
    return [curve for curve in curves if values.items() <= curve.items()]


def lines_by(curves: Sequence[Curve], by: str) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
    """Return curves of error or residual against iterations, by the value of the key `by`."""
    values = [(curve[by], curve.get("residual") or curve["error"]) for curve in curves]
    return {name if isinstance(name, str) else f"a = {name:g}": (range(len(y)), y) for name, y in values}


def by_iteration(title: str, first: Sequence[str]) -> Table:
    return table_of(title, first, [str(count) for count in SHOWN])


def add_iterations(table: Table, first: Sequence[str], values: Sequence[float]) -> None:
    table.add_row(*first, *(f"{values[count]:.1e}" if count < len(values) else "" for count in SHOWN))


def table_of(title: str, first: Sequence[str], columns: Sequence[str]) -> Table:
    table = Table(*first, box=box.MARKDOWN, title=f"[bold]{title}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table
