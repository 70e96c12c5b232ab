"""Accuracies that papers print, as `published.toml` lists them."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from kalmix_bench.runner.paper_claims import PublishedScore


def published_score(task: str, layer: str) -> PublishedScore | None:
    """Return the figures that papers print of a layer on a task, at their own sizes."""
    for source in _sources():
        percent = source["accuracy"].get(layer, {}).get(task)
        if percent is not None:
            return PublishedScore(percent, source["name"])
    return None


@cache
def _sources() -> list[dict[str, Any]]:
    return tomllib.loads(
        files("kalmix_bench.experiments.recall").joinpath("published.toml").read_text(encoding="utf-8")
    )["source"]
