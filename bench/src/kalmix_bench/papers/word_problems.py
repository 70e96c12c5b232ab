"""Accuracy on word problems by depth and length, and the number of blocks that solves a length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kalmix_bench.experiments.recall.summary import summarize, values_by_length
from kalmix_bench.papers.quantities import CommittedResults, Sizes

SOLVED = 0.9  # accuracy of the best seed from which on a problem is solved, by section G.1 of Kalman Linear Attention


class BlockCount(NamedTuple):
    """Bounds of the smallest number of blocks that solves a word problem.

    Attributes:
        at_least, at_most: bounds; `at_most` is infinite if no depth solves it.
        seeds: smallest number of seeds of a depth.
    """

    at_least: int
    at_most: float
    seeds: int

    def __str__(self) -> str:
        if self.at_most == self.at_least:
            return str(self.at_least)
        if math.isfinite(self.at_most):
            return f"at most {self.at_most:.0f}"
        return f"more than {self.at_least - 1}" if self.at_least > 1 else "unknown"

    def is_at_most(self, limit: int) -> bool | None:
        """Return whether the number does not exceed a limit; `None` if depths that decide it have not run."""
        return True if self.at_most <= limit else False if self.at_least > limit else None

    def is_below(self, other: BlockCount) -> bool | None:
        """Return whether the number is smaller than another one; `None` if depths that decide it have not run."""
        return True if self.at_most < other.at_least else False if self.at_least >= other.at_most else None


def accuracies(
    results: CommittedResults, files: Sequence[str], task: str, layer: str, sizes: Sizes
) -> dict[int, dict[int, list[float]]]:
    """Return the accuracy of each seed of a layer by depth and number of elements; the first file with rows counts."""
    for file in files:
        rows = [row for row in results.rows(file) if (row.get("task"), row.get("layer")) == (task, layer)]
        entries = [one for one in summarize(rows) if one.hidden_size == sizes.get("hidden_size", one.hidden_size)]
        entries = [one for one in entries if one.rows and sizes.get("condition", "") in one.condition]
        if entries:
            most_seeds_last = sorted(entries, key=lambda one: len(one.rows))
            return {one.depth: values_by_length(one) for one in most_seeds_last}
    return {}


def count_blocks(by_depth: dict[int, dict[int, list[float]]], length: int) -> BlockCount | None:
    """Return the number of blocks with which a layer solves words of a length; `None` if it has no accuracies there.

    Args:
        by_depth: result of `accuracies`.
        length: number of elements.
    """
    at_length = {depth: values[length] for depth, values in by_depth.items() if length in values}
    if not at_length:
        return None
    solving = {depth for depth, values in at_length.items() if max(values) >= SOLVED}
    failed = at_length.keys() - solving
    at_least = next(depth for depth in range(1, max(at_length) + 2) if depth not in failed)
    return BlockCount(at_least, min(solving, default=math.inf), min(map(len, at_length.values())))
