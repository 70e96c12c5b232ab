"""Numbers of committed results, looked up by their place.

A place is a mapping with `file`, a path below the folder of results, and further keys that depend on the kind of file:

- `.jsonl` with `task`, `layer` and `score`: the mean over seeds of the rows of an experiment. Optional: `condition`, a
  text that the finding's condition contains; `hidden_size` and `depth`; and `chosen_on`: "test" for the epoch that test
  rows choose, as in the papers, or "validation" for the one that validation rows choose. `file` may be a list: the
  first file with such rows counts.
- `.json` or `.jsonl` with `path`: keys, indices, and mappings that select the one row of a list that has these values.
  `over`, a second path, divides the number; `scale` multiplies it.
- `.md` with `table` (how its heading begins), `row` (cells by column) and `column`. A column "seeds" is the
  number of seeds.

A file that is not committed yet has no rows and no numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from kalmix.errors import ArgumentError
from kalmix.files import read_text
from kalmix_bench.experiments.recall.summary import ENCODER_ONLY
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.experiment import Experiment
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.report import latest_rows

Place = Mapping[str, Any]
# Ends the names of scores of the epoch that test rows choose, if there are validation rows.
ON_TEST = ", chosen on test"


class Sizes(TypedDict, total=False):
    """Text and sizes that tell rows of one task and layer apart.

    Attributes:
        condition: text that the finding's condition contains.
        hidden_size, depth: sizes of the model.
        chosen_on: "test" or "validation", the rows that choose the epoch.
    """

    condition: str
    hidden_size: int
    depth: int
    chosen_on: str


class Measured(NamedTuple):
    """Number of ours.

    Attributes:
        value: the number; a mean if there are several seeds.
        error: standard error of the mean; NaN if there is one seed, or none are needed.
        seeds: number of seeds; 0 if the number depends on no seed, or the file does not say.
        diverged: number of further seeds that diverged. If all did, the value is NaN.
        file: file of results that holds the number.
    """

    value: float
    error: float = math.nan
    seeds: int = 0
    diverged: int = 0
    file: str = ""


class CommittedResults:
    """Folder of committed results.

    Args:
        folder: the folder, such as `bench/results`.
        experiments: experiments whose rows it holds.
    """

    def __init__(self, folder: Path, experiments: Sequence[Experiment[Any]]) -> None:
        self.folder = folder
        self.experiments = experiments
        self._rows: dict[str, list[Row]] = {}
        self._findings: dict[str, list[Finding]] = {}

    def existing(self, files: Sequence[str]) -> list[str]:
        """Return the files that are committed."""
        return [file for file in files if (self.folder / file).is_file()]

    def rows(self, file: str) -> list[Row]:
        """Return the rows of a file, the last of each cell; none if there is no such file."""
        if file not in self._rows:
            self._rows[file] = latest_rows(Results(self.folder / file).read())
        return self._rows[file]

    def findings(self, file: str) -> list[Finding]:
        """Return the findings of the rows of a file."""
        if file not in self._findings:
            rows = self.rows(file)
            selections = [(experiment, experiment.select(rows)) for experiment in self.experiments]
            self._findings[file] = [one for experiment, own in selections if own for one in experiment.findings(own)]
        return self._findings[file]

    def find(
        self, files: str | Sequence[str], task: str, layer: str, score: str, **sizes: Unpack[Sizes]
    ) -> Measured | None:
        """Return the score of a layer on a task; `None` if no row has it.

        Args:
            files: file of rows, or several; the first with such rows counts.
            task, layer, score: names.
            sizes: see `Sizes`.

        Raises:
            ArgumentError: findings under several conditions fit.
        """
        for file in [files] if isinstance(files, str) else files:
            found = self._find(file, task, layer, score, sizes) or self._diverged(file, task, layer, sizes)
            if found is not None:
                return found._replace(file=file)
        return None

    def _find(self, file: str, task: str, layer: str, score: str, sizes: Sizes) -> Measured | None:
        condition, chosen_on = sizes.get("condition", ""), sizes.get("chosen_on", "")
        own = [one for one in self.findings(file) if (one.task, one.layer) == (task, layer)]
        own = [one for one in own if all(one.metadata.get(name) == size for name, size in _model_sizes(sizes).items())]
        own = [one for one in own if _is_score(one, score, chosen_on)]
        fitting = [one for one in own if one.condition == condition] or [
            one for one in own if condition in one.condition
        ]
        if chosen_on == "test" and len({bool(one.metadata.get("validation")) for one in fitting}) > 1:
            most = max(fitting, key=lambda one: (one.seeds, one.metadata.get("validation", 0)))
            fitting = [one for one in fitting if one.metadata.get("validation") == most.metadata.get("validation")]
        if ENCODER_ONLY not in condition:  # another reading of a paper counts only if it is named
            fitting = [one for one in fitting if ENCODER_ONLY not in one.condition]
        if len(fitting) > 1:
            conditions = [one.label for one in fitting]
            raise ArgumentError("condition", got=repr(condition), expected=f"text of one of {conditions}")
        if not fitting:
            return None
        return Measured(*fitting[0].value, fitting[0].seeds, fitting[0].metadata.get("diverged", 0))

    def _diverged(self, file: str, task: str, layer: str, sizes: Sizes) -> Measured | None:
        """Return NaN with the number of seeds if rows of the layer on the task diverged; `None` if there are none."""
        rows = [row for row in self.rows(file) if (row.get("task"), row.get("layer")) == (task, layer)]
        count = sum("diverged" in row and _model_sizes(sizes).items() <= row["shape"].items() for row in rows)
        return Measured(math.nan, diverged=count) if count else None

    def look_up(self, place: Place) -> Measured | None:
        """Return the number at a place; `None` if a file of rows has no such row, or there is no such file.

        Raises:
            ArgumentError: a file of another kind has no such number.
        """
        file = place["file"]
        if "task" in place:
            sizes: Any = {name: place[name] for name in Sizes.__annotations__ if name in place}
            return self.find(file, place["task"], place["layer"], place["score"], **sizes)
        if not self.existing([file]):
            return None
        try:
            if "path" in place:
                content = self._content(file)
                divisor = _follow(content, place["over"]) if "over" in place else 1
                return Measured(place.get("scale", 1) * _follow(content, place["path"]) / divisor, file=file)
            row = _Table.of(read_text(self.folder / file), place["table"]).select(place["row"])
            return Measured(float(row[place["column"]]), seeds=int(row.get("seeds", 0)), file=file)
        except (LookupError, ValueError) as error:
            raise ArgumentError("place", got=f"{dict(place)} ({error})", expected="the place of a number") from None

    def look_up_pair(self, first: Place, second: Place) -> tuple[Measured | None, Measured | None]:
        """Return the numbers at two places, from the first file that has both if the places name several."""
        files = first["file"]
        if files == second["file"] and not isinstance(files, str):
            for file in files:
                pair = [self.look_up({**place, "file": file}) for place in (first, second)]
                if None not in pair:
                    return pair[0], pair[1]
        return self.look_up(first), self.look_up(second)

    def _content(self, file: str) -> Any:
        text = read_text(self.folder / file)
        return [json.loads(line) for line in text.splitlines()] if file.endswith(".jsonl") else json.loads(text)


def _model_sizes(sizes: Sizes) -> dict[str, Any]:
    return {name: size for name, size in sizes.items() if name in ("hidden_size", "depth")}


def _is_score(finding: Finding, score: str, chosen_on: str) -> bool:
    """Return whether a finding has a score, of the epoch that the given rows chose; any if `chosen_on` is empty."""
    if not chosen_on:
        return finding.score == score
    by_validation = bool(finding.metadata.get("validation"))
    wanted = score + ON_TEST if chosen_on == "test" and by_validation else score
    return finding.score == wanted and (chosen_on == "test" or by_validation)


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
