"""Rows that cells of the campaign would write, with invented scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kalmix_bench.datasets import TASKS
from kalmix_bench.experiments.recall.protocol import RecallCell

# Takes a cell and the index of a part with test rows; returns its main score.
ScoreFn = Callable[[RecallCell, int], float]
BETTER_ON_TEST = 0.004  # by which the epoch that test rows choose is better


def campaign_row(cell: RecallCell, score: ScoreFn) -> dict[str, Any]:
    """Return a row of a cell."""
    parts = [{name: score(cell, i) for name in TASKS[cell.task].scores} for i in range(_tested(cell))]
    scores = _means(parts)
    better = {name: value + BETTER_ON_TEST for name, value in scores.items()}
    held_out = cell.protocol.validation > 0
    slices = {"score": parts, "loss": parts, "last": parts}
    return {
        **cell.to_dict(),
        "seconds": 100.0,
        "peak_memory": 1,
        "versions": {"kalmix": "0.1.0"},
        "device": "NVIDIA H200",
        "commit": "abc",
        **{"parameters": 1000, "layer_parameters": 100, "state": 2048},
        "score": next(iter(scores)),
        "scores": {"test_loss": 1.0, **scores},
        **({"test_chosen_scores": {"test_loss": 1.0, **better}} if held_out else {}),
        "slices": slices,
        "curves": {"loss": [1.0], "test_loss": [1.0], **{name: [value] for name, value in scores.items()}},
        **{"epochs": 1, "training_seconds": 90.0, "evaluation_seconds": 1.0, "tokens_per_second": 1},
    }


def diverged_row(cell: RecallCell) -> dict[str, Any]:
    """Return a row of a cell that diverged."""
    row = campaign_row(cell, lambda *_: 0.0)
    first = list(row)[: list(row).index("state") + 1]
    return {**{name: row[name] for name in first}, "diverged": "loss is not finite"}


def campaign_rows(cells: Iterable[RecallCell], score: ScoreFn) -> list[dict[str, Any]]:
    """Return the rows of cells in their order."""
    return [campaign_row(cell, score) for cell in cells]


def _tested(cell: RecallCell) -> int:
    return sum(part.test > 0 for part in cell.parts)


def _means(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
