"""Tables of scores, beside the figures that papers print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kalmix.evaluation.printed_figures import printed_tables
from kalmix.evaluation.suites import PERPLEXITY, SUITES

MISSING = "-"
DEPTHS = tuple(f"{n}-{n + 10}%" for n in range(0, 100, 10))  # tenths of the prompt


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
    return _by_length(suite, name, tasks) if SUITES[suite].by_length else _comparison(suite, name, tasks)


def _by_length(suite: str, name: str, tasks: Mapping[str, Mapping[str, Any]]) -> list[ScoreTable]:
    """Return tables of scores by task and length, of needles by depth, and of perplexities by length."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for key, record in tasks.items():
        task, _, length = key.partition("@")
        if length:
            found.setdefault(task, {})[int(length)] = record
    texts, tables = found.pop(PERPLEXITY, {}), []
    lengths = sorted({length for records in found.values() for length in records})
    headings = [f"{length:,}" for length in lengths]
    if found:
        rows = [
            [x.title, *(_score(found[x.task].get(length)) for length in lengths)]
            for x in SUITES[suite].columns
            if x.task in found
        ]
        counts = {record["rows"] for records in found.values() for record in records.values()}
        notes = [f"Score in % by length in tokens, from generated text. Rows of a task: {_range(counts)}."]
        tables.append(ScoreTable(f"RULER: {name}", ["task", *headings], rows, notes))
    tables += _by_depth(suite, name, found, lengths)
    if texts:
        order = sorted(texts)
        rows = [["perplexity", *(f"{texts[length]['scores'][PERPLEXITY]:.3f}" for length in order)]]
        rows.append(["nats per token", *(f"{texts[length]['scores']['nats_per_token']:.4f}" for length in order)])
        notes = ["By length of windows in tokens, which do not overlap. All lengths read the same tokens."]
        tables.append(ScoreTable(f"Perplexity: {name}", ["", *(f"{length:,}" for length in order)], rows, notes))
    return tables


def _by_depth(
    suite: str, name: str, found: Mapping[str, Mapping[int, Mapping[str, Any]]], lengths: Sequence[int]
) -> list[ScoreTable]:
    """Return a table of needles by depth and length, over all tasks; and one by task, if there are several."""
    counts = {
        (column, length): found[column.task][length]["deciles"]
        for column in SUITES[suite].columns
        for length in sorted(found.get(column.task, {}))
        if "deciles" in found[column.task][length]
    }
    if not counts:
        return []
    pooled = [[x for (_, other), x in counts.items() if other == length] for length in lengths]
    rows = [[depth, *(_percent(_found(group, n)) for group in pooled)] for n, depth in enumerate(DEPTHS)]
    notes = ["Found needles in % by length in tokens, over all needle tasks. Depth 0% is the beginning of the prompt."]
    headings = ["depth", *(f"{length:,}" for length in lengths)]
    tables = [ScoreTable(f"Needles by depth: {name}", headings, rows, notes)]
    if len({column for column, _ in counts}) > 1:
        rows = [
            [column.title, f"{length:,}", *(_percent(_found([x], n), digits=1) for n in range(len(DEPTHS)))]
            for (column, length), x in counts.items()
        ]
        notes = ["Found needles in % by depth. A dash: no needle of the task at this depth."]
        tables.append(ScoreTable(f"Needles by task and depth: {name}", ["task", "tokens", *DEPTHS], rows, notes))
    return tables


def _score(record: Mapping[str, Any] | None) -> str:
    return _percent(None if record is None else 100 * record["scores"]["score"])


def _found(groups: Sequence[Sequence[Mapping[str, int]]], decile: int) -> float | None:
    """Return the percentage of needles at a depth that were found, in all `groups`; `None` if there are none."""
    total = sum(counts[decile]["needles"] for counts in groups)
    return 100 * sum(counts[decile]["found"] for counts in groups) / total if total else None


def _range(counts: set[int]) -> str:
    return str(*counts) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


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


def _percent(value: float | None, *, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
