"""Numbers of committed results, looked up by their place.

A place is a mapping with `file`, a path below the folder of results, and further keys that depend on the kind of file:

- `.jsonl` with `task`, `layer` and `score`, and optionally `condition`, a text that the finding's condition contains:
  the mean over seeds of the rows of an experiment.
- `.json` or `.jsonl` with `path`: keys, indices, and mappings that select the one row of a list that has these values.
  `over`, a second path, divides the number; `scale` multiplies it.
- `.md` with `table` (how its heading begins), `row` (cells by column) and `column`. A column "seeds" is the
  number of seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kalmix.errors import ArgumentError
from kalmix.files import read_text
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.experiment import Experiment
from kalmix_bench.runner.paper_claims import Finding


class Measured(NamedTuple):
    """Number of ours.

    Attributes:
        value: the number; a mean if there are several seeds.
        error: standard error of the mean; NaN if there is one seed, or none are needed.
        seeds: number of seeds; 0 if the number depends on no seed, or the file does not say.
    """

    value: float
    error: float = math.nan
    seeds: int = 0


class CommittedResults:
    """Folder of committed results.

    Args:
        folder: the folder, such as `bench/results`.
        experiments: experiments whose rows it holds.
    """

    def __init__(self, folder: Path, experiments: Sequence[Experiment[Any]]) -> None:
        self.folder = folder
        self.experiments = experiments
        self._findings: dict[str, list[Finding]] = {}

    def findings(self, file: str) -> list[Finding]:
        """Return the findings of the rows of a file."""
        if file not in self._findings:
            rows = list(Results(self.folder / file).read())
            selections = [(experiment, experiment.select(rows)) for experiment in self.experiments]
            self._findings[file] = [one for experiment, own in selections if own for one in experiment.findings(own)]
        return self._findings[file]

    def find(self, file: str, task: str, layer: str, score: str, condition: str = "") -> Measured | None:
        """Return the score of a layer on a task; `None` if no row has it.

        Raises:
            ArgumentError: findings under several conditions fit.
        """
        key = task, layer, score
        of_layer = [one for one in self.findings(file) if (one.task, one.layer, one.score) == key]
        fitting = [one for one in of_layer if one.condition == condition] or [
            one for one in of_layer if condition in one.condition
        ]
        if len(fitting) > 1:
            conditions = [one.condition for one in fitting]
            raise ArgumentError("condition", got=repr(condition), expected=f"text of one of {conditions}")
        return Measured(*fitting[0].value, fitting[0].seeds) if fitting else None

    def look_up(self, place: Mapping[str, Any]) -> Measured | None:
        """Return the number at a place; `None` if a file of rows has no such row.

        Raises:
            ArgumentError: a file of another kind has no such number.
        """
        file = place["file"]
        if "task" in place:
            return self.find(file, place["task"], place["layer"], place["score"], place.get("condition", ""))
        try:
            if "path" in place:
                content = self._content(file)
                divisor = _follow(content, place["over"]) if "over" in place else 1
                return Measured(place.get("scale", 1) * _follow(content, place["path"]) / divisor)
            row = _Table.of(read_text(self.folder / file), place["table"]).select(place["row"])
            return Measured(float(row[place["column"]]), seeds=int(row.get("seeds", 0)))
        except (LookupError, ValueError) as error:
            raise ArgumentError("place", got=f"{dict(place)} ({error})", expected="the place of a number") from None

    def _content(self, file: str) -> Any:
        text = read_text(self.folder / file)
        return [json.loads(line) for line in text.splitlines()] if file.endswith(".jsonl") else json.loads(text)


def _follow(value: Any, path: Sequence[Any]) -> float:
    """Return the number at the end of a path of keys, indices and selections of rows."""
    for step in path:
        if isinstance(step, Mapping):
            rows = [row for row in value if all(row.get(key) == wanted for key, wanted in step.items())]
            if len(rows) != 1:
                raise LookupError(f"{len(rows)} rows have {dict(step)}")
            value = rows[0]
        else:
            value = value[step]
    return float(value)


class _Table:
    """Table of a Markdown file: lines of cells, the header first."""

    def __init__(self, lines: Sequence[Sequence[str]]) -> None:
        self.lines = lines

    @classmethod
    def of(cls, text: str, heading: str) -> _Table:
        """Return the table below the heading that begins with a text."""
        lines = iter(text.splitlines())
        if not any(line.lstrip("# ").startswith(heading) for line in lines if line.startswith("#")):
            raise LookupError(f"no heading {heading!r}")
        table: list[list[str]] = []
        for line in lines:
            if line.startswith("|"):
                table.append([cell.strip() for cell in line.strip("|").split("|")])
            elif table or line.startswith("#"):
                break
        return cls(table)

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """Rows by column; the header and the line below it are not rows."""
        header, _, *rows = self.lines
        return [dict(zip(header, row, strict=True)) for row in rows]

    def select(self, cells: Mapping[str, str]) -> dict[str, str]:
        """Return the one row that has these cells."""
        rows = [row for row in self.rows if all(row[column] == cell for column, cell in cells.items())]
        if len(rows) != 1:
            raise LookupError(f"{len(rows)} rows have {dict(cells)}")
        return rows[0]
