"""Accuracies printed in papers, from `published.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from kalmix_bench.runner.paper_claims import PublishedScore


def published_score(task: str, layer: str) -> PublishedScore | None:
    """Return the accuracy that a paper prints for a layer on a task, at the paper's sizes; `None` if there is none."""
    for source in _sources():
        percent = source["accuracy"].get(layer, {}).get(task)
        if percent is not None:
            return PublishedScore(percent, source["name"])
    return None


def published_scores(name: str) -> Iterator[tuple[str, str, float]]:
    """Yield layer, task and percent of all accuracies of a source.

    Args:
        name: name of the source in `published.toml`.
    """
    (source,) = (one for one in _sources() if one["name"] == name)
    for layer, accuracies in source["accuracy"].items():
        for task, percent in accuracies.items():
            yield layer, task, percent


@cache
def _sources() -> list[dict[str, Any]]:
    return tomllib.loads(
        files("kalmix_bench.experiments.recall").joinpath("published.toml").read_text(encoding="utf-8")
    )["source"]
