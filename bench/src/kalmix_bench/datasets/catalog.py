"""Every benchmark whose data are rows of integers, and the one door to them."""

from __future__ import annotations

from typing import Any

from kalmix.errors import ArgumentError, nearest_names
from kalmix_bench.datasets import mad, mqar, ruler, words
from kalmix_bench.datasets.task import Data, Task

TASKS: dict[str, Task[Any]] = {get_task.name: get_task for get_task in (*mad.ALL, *mqar.ALL, *words.ALL, *ruler.ALL)}


def get_task(name: str) -> Task[Any]:
    """The benchmark of this name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in TASKS:
        raise ArgumentError(
            "name", got=repr(name), expected=f"one of kalmix_bench.datasets.TASKS, such as {nearest_names(name, TASKS)}"
        )
    return TASKS[name]


def make(name: str, *, seed: int, train: int, test: int, **settings: Any) -> Data:
    """Rows of a benchmark: those of its own code, where that is public.

    Args:
        name: a key of `TASKS`, as "mad/selective-copying".
        seed: what the rows are drawn from, and nothing else is: no global generator is read or moved.
        train, test: how many rows; 0 is legal. How test rows depend on the number of train rows is said where the
            task is (of MAD, they follow the train rows out of one generator).
        settings: by the benchmark's own names; its baseline has the others (`TASKS[name].baseline`).

    Returns:
        Data: with int64 arrays `train.inputs`, `train.targets`, `test.inputs`, `test.targets`, each `[rows, T]`, and
        targets -100 where nothing is scored.

    Raises:
        ArgumentError: there is no such benchmark or setting; a setting has a value that it cannot have; sizes do not
            fit one another.
    """
    return get_task(name).make(seed=seed, train=train, test=test, **settings)
