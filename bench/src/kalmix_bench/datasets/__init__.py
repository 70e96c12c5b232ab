"""Benchmarks: what each asks, how it is scored. `kalmix.training` trains on them, `kalmix.cli` shows the scores.

Those whose data are rows of integers have one door: `make("mad/selective-copying", seed=12345, train=64, test=64)`.
"""

from kalmix_bench.datasets.catalog import TASKS, get_task, make
from kalmix_bench.datasets.task import Data, Published, Rows, Task

__all__ = ["TASKS", "Data", "Published", "Rows", "Task", "get_task", "make"]
