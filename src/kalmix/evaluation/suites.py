"""Suites of tasks that papers report, and the metric that each paper prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kalmix.errors import unknown_name


class Column(NamedTuple):
    """Column of a table of scores.

    Attributes:
        task: name of the task in lm-eval.
        metric: metric that the paper prints.
        title: heading of the column.
    """

    task: str
    metric: str
    title: str


class Suite(NamedTuple):
    """Tasks of a paper.

    Attributes:
        title: text that names the suite in tables.
        columns: tasks, in the order of the paper's table.
    """

    title: str
    columns: tuple[Column, ...]


class Unit(NamedTuple):
    """Part of an evaluation that is run and stored at once: a task."""

    column: Column

    @property
    def key(self) -> str:
        """Name of the unit in the file of results."""
        return self.column.task


SUITES: dict[str, Suite] = {
    # Kalman Linear Attention, Table 4 and appendix G.6: acc_norm for HellaSwag and ARC-Challenge, acc for all others.
    "kla": Suite(
        "Zero-shot tasks of Kalman Linear Attention (accuracy in %)",
        (
            Column("lambada_openai", "acc", "LAMB."),
            Column("hellaswag", "acc_norm", "HellaS."),
            Column("piqa", "acc", "PIQA"),
            Column("arc_easy", "acc", "Arc-E"),
            Column("arc_challenge", "acc_norm", "Arc-C"),
            Column("winogrande", "acc", "WinoGr."),
            Column("openbookqa", "acc", "OBQA"),
            Column("boolq", "acc", "BoolQ"),
        ),
    ),
    # Gated KalmaNet, Tables 7, 8 and 11.
    "gka": Suite(
        "LM-Harness tasks of Gated KalmaNet (score in %)",
        (
            Column("arc_challenge", "acc_norm", "ARC-C"),
            Column("arc_easy", "acc_norm", "ARC-E"),
            Column("boolq", "acc", "BoolQ"),
            Column("copa", "acc", "COPA"),
            Column("hellaswag", "acc_norm", "HellaSWAG"),
            Column("piqa", "acc_norm", "PIQA"),
            Column("sciq", "acc_norm", "SciQ"),
            Column("winogrande", "acc", "Winogrande"),
            Column("fda", "contains", "FDA"),
            Column("swde", "contains", "SWDE"),
        ),
    ),
}


def units_of(suite: str, tasks: Sequence[str] = ()) -> list[Unit]:
    """Return the units of an evaluation, in order.

    Args:
        suite: name of a suite.
        tasks: names of its tasks to run. Default: all.

    Raises:
        ArgumentError: a name is unknown.
    """
    if suite not in SUITES:
        raise unknown_name("suite", suite, SUITES)
    names = [column.task for column in SUITES[suite].columns]
    for task in tasks:
        if task not in names:
            raise unknown_name("tasks", task, names)
    return [Unit(column) for column in SUITES[suite].columns if not tasks or column.task in tasks]
