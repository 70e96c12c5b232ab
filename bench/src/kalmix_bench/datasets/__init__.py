"""Tasks of the papers: their rows, and the metrics that score predictions. No models, no training.

Tasks whose rows are integers are made by `make("mad/selective-copying", seed=12345, train=64, test=64)`.
"""

from kalmix_bench.datasets.catalog import TASKS, get_task, make
from kalmix_bench.datasets.task import Data, Published, Rows, Task

__all__ = ["TASKS", "Data", "Published", "Rows", "Task", "get_task", "make"]
