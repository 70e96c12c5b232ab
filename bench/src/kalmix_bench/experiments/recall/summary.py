"""Rows of one layer on one task, put together over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, NamedTuple

from kalmix_bench import datasets
from kalmix_bench.runner.cells import Row
from kalmix_bench.runner.scores import Score


@dataclass(frozen=True)
class LayerSummary:
    """One layer in one place of a comparison, all its seeds together.

    Attributes:
        task, layer, hidden_size, depth: where.
        asked: what of the rows differs from the task's baseline, in words.
        rows: a seed each, at the learning rate and weight decay that did best; diverged ones left out.
        diverged: how many seeds of those did.
    """

    task: str
    condition: str
    layer: str
    hidden_size: int
    depth: int
    rows: tuple[Row, ...]
    diverged: int

    @property
    def main_score(self) -> str:
        """The score that its papers report."""
        return self.rows[0]["score"]

    def score(self, name: str, kind: str = "scores") -> Score | None:
        """Return a score over seeds; `None` where all diverged.

        Args:
            name: of the score.
            kind: "scores"; or "test_chosen_scores" of the epoch that test rows choose, where validation rows chose.
        """
        return Score.of([row[kind][name] for row in self.rows]) if self.rows else None

    def mean_of(self, fact: str) -> float:
        """Of a number that every row has."""
        return mean(row[fact] for row in self.rows)


def summarize(rows: Iterable[Row]) -> list[LayerSummary]:
    """Rows of benchmarks put together: tasks in the order in which they first come, and the layers of each."""
    groups: dict[tuple[Any, ...], dict[tuple[float, float], list[Row]]] = {}
    for row in rows:
        protocol, shape = dict(row["protocol"]), row["shape"]
        tried = protocol.pop("learning_rate"), protocol.pop("weight_decay")
        place = (row["task"], describe_condition(row), row["layer"], shape["hidden_size"], shape["depth"])
        alike = (*place, json.dumps([protocol, shape, row["parts"]]))
        groups.setdefault(alike, {}).setdefault(tried, []).append(row)
    found = []
    for (*place, _), tries in groups.items():
        best = max(tries.values(), key=lambda rows: mean(_main(row) for row in rows))
        sound = tuple(row for row in best if "diverged" not in row)
        found.append(LayerSummary(*place, rows=sound, diverged=len(best) - len(sound)))
    studies = list(dict.fromkeys((entry.task, entry.condition) for entry in found))
    return sorted(found, key=lambda entry: studies.index((entry.task, entry.condition)))


def _main(row: Row) -> float:
    return 0.0 if "diverged" in row else row["scores"][row["score"]]


def describe_condition(row: Row) -> str:
    """What of a row's task differs from the baseline, in words."""
    baseline, parts = asdict(datasets.get_task(row["task"]).baseline), row["parts"]
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


def slices(entry: LayerSummary, chosen: str = "score") -> Slices:
    """Main scores by length and by what else the parts of a task differ in."""
    by, found = "", {}
    for row in entry.rows:
        judged = [part["settings"] for part in row["parts"] if part["test"]]
        for settings, scores in zip(judged, row["slices"][chosen], strict=True):
            if "num_kv_pairs" in settings:
                by, at = "pairs", (settings["input_seq_len"], settings["num_kv_pairs"])
                found.setdefault(at, []).append(scores[entry.main_score])
            for name in (name for name in scores if name.startswith("depth ")):
                by, part = name.split()
                found.setdefault((settings["max_seq_length"], part), []).append(scores[name])
    return Slices(by, {at: mean(values) for at, values in sorted(found.items())})
