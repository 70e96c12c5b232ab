"""What rows of results say together: scores over seeds, beside those that papers print."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from statistics import mean, stdev
from typing import Any, NamedTuple

from kalmix_bench import datasets as tasks
from kalmix_bench.runner.cells import Row


class Score(NamedTuple):
    """Of several seeds: their mean and its standard error, NaN of one."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """From one value a seed."""
        return cls(mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan)

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if math.isnan(self.error) else f" ± {100 * self.error:.1f}")


@dataclass(frozen=True)
class Entry:
    """One layer in one place of a comparison, all its seeds together.

    Attributes:
        task, layer, width, depth: where.
        asked: what of the rows differs from the task's baseline, in words.
        rows: a seed each, at the learning rate and weight decay that did best; diverged ones left out.
        diverged: how many seeds of those did.
    """

    task: str
    asked: str
    layer: str
    width: int
    depth: int
    rows: tuple[Row, ...]
    diverged: int

    @property
    def main(self) -> str:
        """The score that its papers report."""
        return self.rows[0]["score"]

    def score(self, name: str, kind: str = "scores") -> Score | None:
        """Return a score over seeds; `None` where all diverged.

        Args:
            name: of the score.
            kind: "scores"; or "test_chosen_scores" of the epoch that test rows choose, where validation rows chose.
        """
        return Score.of([row[kind][name] for row in self.rows]) if self.rows else None

    def average(self, fact: str) -> float:
        """Of a number that every row has."""
        return mean(row[fact] for row in self.rows)


def entries(rows: Iterable[Row]) -> list[Entry]:
    """Rows of benchmarks put together: tasks in the order in which they first come, and the layers of each."""
    groups: dict[tuple[Any, ...], dict[tuple[float, float], list[Row]]] = {}
    for row in rows:
        protocol, shape = dict(row["protocol"]), row["shape"]
        tried = protocol.pop("rate"), protocol.pop("decay")
        place = (row["task"], asked(row), row["layer"], shape["width"], shape["depth"])
        alike = (*place, json.dumps([protocol, shape, row["parts"]]))
        groups.setdefault(alike, {}).setdefault(tried, []).append(row)
    found = []
    for (*place, _), tries in groups.items():
        best = max(tries.values(), key=lambda rows: mean(_main(row) for row in rows))
        sound = tuple(row for row in best if "diverged" not in row)
        found.append(Entry(*place, rows=sound, diverged=len(best) - len(sound)))
    studies = list(dict.fromkeys((entry.task, entry.asked) for entry in found))
    return sorted(found, key=lambda entry: studies.index((entry.task, entry.asked)))


def _main(row: Row) -> float:
    return 0.0 if "diverged" in row else row["scores"][row["score"]]


def asked(row: Row) -> str:
    """What of a row's task differs from the baseline, in words."""
    baseline, parts = asdict(tasks.task(row["task"]).baseline), row["parts"]
    values = {name: list(dict.fromkeys(part["settings"][name] for part in parts)) for name in parts[0]["settings"]}
    told = [f"{n} {'/'.join(map(str, those))}" for n, those in values.items() if those != [baseline[n]]]
    rows, protocol = sum(part["train"] for part in parts), row["protocol"]
    told.append(f"{rows} rows, {protocol['epochs']} times at most")
    if protocol.get("validation"):
        told.append(f"epoch chosen on {protocol['validation']} validation rows")
    return ", ".join(told)


class Slices(NamedTuple):
    """Main scores of a layer, sliced.

    Attributes:
        by: "pairs", or "depth" of the answer; empty for tasks that have no such thing.
        scores: by length, and by how many pairs there are or in which part of a row the answer lies; over seeds.
    """

    by: str
    scores: dict[tuple[int, Any], float]


def slices(entry: Entry, chosen: str = "score") -> Slices:
    """Main scores by length and by what else the parts of a task differ in."""
    by, found = "", {}
    for row in entry.rows:
        judged = [part["settings"] for part in row["parts"] if part["test"]]
        for settings, scores in zip(judged, row["slices"][chosen], strict=True):
            if "num_kv_pairs" in settings:
                by, at = "pairs", (settings["input_seq_len"], settings["num_kv_pairs"])
                found.setdefault(at, []).append(scores[entry.main])
            for name in (name for name in scores if name.startswith("depth ")):
                by, part = name.split()
                found.setdefault((settings["max_seq_length"], part), []).append(scores[name])
    return Slices(by, {at: mean(values) for at, values in sorted(found.items())})


class Printed(NamedTuple):
    """An accuracy in a paper, in percent, and where."""

    percent: float
    source: str


def printed(task: str, layer: str) -> Printed | None:
    """What papers print of a layer on a task, at their own sizes."""
    for source in _sources():
        percent = source["accuracy"].get(layer, {}).get(task)
        if percent is not None:
            return Printed(percent, source["name"])
    return None


@cache
def _sources() -> list[dict[str, Any]]:
    return tomllib.loads(
        files("kalmix_bench.experiments.recall").joinpath("published.toml").read_text(encoding="utf-8")
    )["source"]
