"""Catalogue of all tasks whose rows are integers, and the function that makes their rows."""

from __future__ import annotations

from typing import Any

from kalmix.errors import unknown_name
from kalmix_bench.datasets import mad, mqar, ruler, words
from kalmix_bench.datasets.task import Data, Task

TASKS: dict[str, Task[Any]] = {get_task.name: get_task for get_task in (*mad.ALL, *mqar.ALL, *words.ALL, *ruler.ALL)}


def get_task(name: str) -> Task[Any]:
    """Return the task of this name.

    Raises:
        ArgumentError: there is no such task.
    """
    if name not in TASKS:
        raise unknown_name("name", name, TASKS)
    return TASKS[name]


def make(name: str, *, seed: int, train: int, test: int, **settings: Any) -> Data:
    """Make the rows of a task. Where the task's original code is public, the rows equal its rows bit for bit.

    Args:
        name: a key of `TASKS`, such as "mad/selective-copying".
        seed: seed of the rows, from 0 to 2^32 - 1. Global random generators are neither used nor changed.
        train, test: numbers of training and test rows, 0 or more. In some tasks test rows depend on the number of
            training rows (MAD draws both from one generator); the task's module documents this.
        settings: settings that differ from the baseline (`TASKS[name].baseline`), named as in the original code.

    Returns:
        Data: with int64 arrays `train.inputs`, `train.targets`, `test.inputs` and `test.targets`, each `[rows, T]`.
        Targets are -100 at tokens that are not scored.

    Raises:
        ArgumentError: there is no such task or setting, or the values of settings are not valid together.
    """
    return get_task(name).make(seed=seed, train=train, test=test, **settings)
