"""Summary of results over seeds: one entry per layer, task and size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, NamedTuple

from kalmix_bench import datasets
from kalmix_bench.runner.cells import Row
from kalmix_bench.runner.scores import Score

ENCODER_ONLY = "no MLP behind the blocks"


@dataclass(frozen=True)
class LayerSummary:
    """Results of one layer on one task at one size, over all seeds.

    Attributes:
        task, layer, hidden_size, depth: identity of the entry.
        condition: settings that differ from the task's baseline, as text.
        rows: one per seed, at the best learning rate and weight decay; without diverged ones.
        diverged: number of seeds that diverged there.
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
        """Name of the score that the task's papers report."""
        return self.rows[0]["score"]

    def score(self, name: str, kind: str = "scores") -> Score | None:
        """Return a score over seeds; `None` if all diverged.

        Args:
            name: name of the score.
            kind: "scores"; or "test_chosen_scores", those of the epoch that test rows select when validation rows are
                used.
        """
        return Score.of([row[kind][name] for row in self.rows]) if self.rows else None

    def mean_of(self, fact: str) -> float:
        """Return the mean of a number that every row has."""
        return mean(row[fact] for row in self.rows)

    @property
    def seconds(self) -> float:
        """Mean time of a run, in all its processes; rows of older versions count compilation as training."""
        names = ("training_seconds", "evaluation_seconds", "compilation_seconds")
        return mean(sum(row.get(name, 0.0) for name in names) for row in self.rows)


def summarize(rows: Iterable[Row]) -> list[LayerSummary]:
    """Group rows of benchmarks by task and layer, in the order in which tasks first occur."""
    groups: dict[tuple[Any, ...], dict[tuple[float, float], list[Row]]] = {}
    for row in rows:
        protocol, shape = dict(row["protocol"]), row["shape"]
        rates = protocol.pop("learning_rate"), protocol.pop("weight_decay")
        place = (row["task"], describe_condition(row), row["layer"], shape["hidden_size"], shape["depth"])
        group = (*place, json.dumps([protocol, shape, row["parts"]]))
        groups.setdefault(group, {}).setdefault(rates, []).append(row)
    summaries = []
    for (*place, _), tries in groups.items():
        best = max(tries.values(), key=lambda rows: mean(_main(row) for row in rows))
        sound = tuple(row for row in best if "diverged" not in row)
        summaries.append(LayerSummary(*place, rows=sound, diverged=len(best) - len(sound)))
    studies = list(dict.fromkeys((entry.task, entry.condition) for entry in summaries))
    return sorted(summaries, key=lambda entry: studies.index((entry.task, entry.condition)))


def _main(row: Row) -> float:
    return 0.0 if "diverged" in row else row["scores"][row["score"]]


def describe_condition(row: Row) -> str:
    """Return the settings of a row that differ from the task's baseline, as text; and whether only an encoder's MLP
    stands around the blocks (`ENCODER_ONLY`).
    """
    baseline, parts = asdict(datasets.get_task(row["task"]).baseline), row["parts"]
    values = {name: list(dict.fromkeys(part["settings"][name] for part in parts)) for name in parts[0]["settings"]}
    parts_text = [f"{n} {'/'.join(map(str, those))}" for n, those in values.items() if those != [baseline[n]]]
    rows, protocol = sum(part["train"] for part in parts), row["protocol"]
    parts_text.append(f"{rows} rows, at most {protocol['epochs']} epochs")
    if protocol.get("validation"):
        parts_text.append(f"epoch chosen on {protocol['validation']} validation rows")
    if row["shape"].get("encoder") and not row["shape"].get("decoder"):
        parts_text.append(ENCODER_ONLY)
    return ", ".join(parts_text)


class Slices(NamedTuple):
    """Main scores of a layer by length and by a second quantity.

    Attributes:
        by: the second quantity: "pairs", or "depth" of the answer; empty if the task has none.
        scores: means over seeds by (length, value of the second quantity).
    """

    by: str
    scores: dict[tuple[int, Any], float]


def slices(entry: LayerSummary, selection: str = "score") -> Slices:
    """Return the main scores by length, and by pairs or depth."""
    by, scores_at = "", {}
    for row in entry.rows:
        judged = [part["settings"] for part in row["parts"] if part["test"]]
        for settings, scores in zip(judged, row["slices"][selection], strict=True):
            if "num_kv_pairs" in settings:
                by, at = "pairs", (settings["input_seq_len"], settings["num_kv_pairs"])
                scores_at.setdefault(at, []).append(scores[entry.main_score])
            for name in (name for name in scores if name.startswith("depth ")):
                by, part = name.split()
                scores_at.setdefault((settings["max_seq_length"], part), []).append(scores[name])
    return Slices(by, {at: mean(values) for at, values in sorted(scores_at.items())})


def scores_by_length(entry: LayerSummary, selection: str = "score") -> dict[int, Score]:
    """Return the main scores of a word problem over seeds, by number of elements; empty for other tasks."""
    return {length: Score.of(values) for length, values in values_by_length(entry, selection).items()}


def values_by_length(entry: LayerSummary, selection: str = "score") -> dict[int, list[float]]:
    """Return the main score of each seed on a word problem, by number of elements; empty for other tasks."""
    scores_at: dict[int, list[float]] = {}
    for row in entry.rows:
        judged = [part["settings"] for part in row["parts"] if part["test"]]
        for settings, scores in zip(judged, row["slices"][selection], strict=True):
            if "k" in settings:
                scores_at.setdefault(settings["k"], []).append(scores[entry.main_score])
    return dict(sorted(scores_at.items()))
