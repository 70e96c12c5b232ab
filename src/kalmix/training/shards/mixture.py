"""Weighted mixture of several folders of shards."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from kalmix.errors import ArgumentError
from kalmix.validation import check_number

Folder = str | os.PathLike[str]


def folder_weights(shards: Any) -> dict[Folder, float]:
    """Return the weight of each folder; a single folder has weight 1.

    Args:
        shards: a folder, or a mapping from folders to weights.

    Raises:
        ArgumentError: there is no folder, or a weight is not positive.
    """
    if isinstance(shards, str | os.PathLike):
        return {shards: 1.0}
    if not isinstance(shards, dict) or not shards:
        raise ArgumentError("shards", got=repr(shards), expected="a folder, or a mapping from folders to weights")
    for weight in shards.values():
        check_number("weight", weight)
    return shards


def fractions(shards: Any) -> list[float]:
    """Return the fraction of the training sequences that each folder gives; arguments are those of `folder_weights`."""
    weights = folder_weights(shards).values()
    return [weight / sum(weights) for weight in weights]


def equal_fractions(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether two lists of fractions are equal, apart from rounding."""
    return len(first) == len(second) and all(map(math.isclose, first, second))
