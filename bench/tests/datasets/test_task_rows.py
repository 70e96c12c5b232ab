"""Rows of a new task are checked when they are drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kalmix.errors import ArgumentError
from kalmix_bench.datasets.metrics import IGNORE_INDEX, micro
from kalmix_bench.datasets.task import Published, Rows, Task


@dataclass(frozen=True)
class Settings:
    largest: int = 1
    lost: int = 0

    @property
    def vocab_size(self) -> int:
        return 2


def sample(settings: Settings, seed: int, train: int, test: int) -> tuple[Rows, Rows]:
    ids = np.random.default_rng(seed).integers(0, 2, (train + test, 6))
    ids[0, 0] = settings.largest
    targets = np.where(ids == 0, IGNORE_INDEX, ids)
    return Rows(ids[:train], targets[:train]), Rows(ids[train:], targets[train : train + test - settings.lost])


TASK = Task("own/task", Settings(), sample, {"micro": micro}, Published("none", 0, 8, 4, 4))


def test_rows_with_ignored_targets_are_accepted() -> None:
    assert len(TASK.make(seed=0, train=8, test=4).test) == 4
    assert len(TASK.make(seed=0, train=8, test=0).test) == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"largest": 2}, "`inputs` of own/task have ids from 0 to 2; expected ids from 0 to 1"),
        ({"largest": -1}, "`inputs` of own/task have ids from -1 to 1"),
        ({"lost": 1}, r"`targets` of own/task have the shape \[3, 6\]; expected \[4, T\]"),
    ],
)
def test_wrong_rows_are_refused(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        TASK.make(seed=0, train=8, test=4, **wrong)
