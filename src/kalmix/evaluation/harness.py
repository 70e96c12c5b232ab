"""Tasks of lm-eval: loading from the hub or from local copies, running, and scores for JSON."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import stdev
from typing import Any

import torch

from kalmix._extras import optional_imports

with optional_imports():
    import datasets
    import lm_eval.tasks
    import numpy as np
    from datasets import config
    from huggingface_hub import constants
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

from kalmix.errors import ArgumentError
from kalmix.evaluation.judge import Judge

lm_evaluate: Any = evaluator.evaluate  # its decorator hides its type
FOLDERS = (  # of the suites' tasks in lm-eval; an index of all its tasks takes long
    *("arc", "fda", "hellaswag", "lambada", "openbookqa", "piqa", "ruler", "sciq", "super_glue", "swde", "winogrande"),
)
SEED = 0  # of all random generators before each task, so that the order of tasks changes nothing


def run_task(judge: Judge, task: Any, limit: int | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a loaded task of lm-eval.

    Args:
        judge: the model.
        task: task, as `load_task` returns it.
        limit: number of rows. Default: all.

    Returns:
        A record for JSON: "scores" by metric, their standard errors "stderr" where a score is a mean over rows, the
        number of "rows", and the task's "version"; and lm-eval's record of each row.
    """
    seed_generators()
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=SEED)
    name = task.task_name
    with quiet():
        found = lm_evaluate(lm=judge, task_dict={"tasks": {name: task}}, limit=limit, bootstrap_iters=0)
    samples = found["samples"][name]
    values = {key.partition(",")[0]: x for key, x in found["results"][name].items() if "," in key}
    scores = {metric: float(x) for metric, x in values.items() if isinstance(x, int | float) and "stderr" not in metric}
    errors = {metric: _standard_error([row.get(metric) for row in samples], mean) for metric, mean in scores.items()}
    record = {
        "scores": scores,
        "stderr": {metric: x for metric, x in errors.items() if x is not None},
        "rows": len(samples),
        "version": str(found["versions"].get(name)),
    }
    return record, samples


def task_manager(metadata: dict[str, Any] | None = None) -> TaskManager:
    """Return lm-eval's own tasks of all suites.

    Args:
        metadata: options that each task gets when it is loaded.
    """
    folder = Path(lm_eval.tasks.__file__).parent
    with quiet():
        return TaskManager(
            include_defaults=False, include_path=[folder / name for name in FOLDERS], metadata=metadata or {}
        )


def load_task(manager: TaskManager, name: str, data: Path | None) -> Any:
    """Load a task of lm-eval with its dataset, by lm-eval's own code.

    Args:
        manager: tasks, as `task_manager` returns them.
        name: name of the task.
        data: folder with copies of datasets, each in a subfolder of its name on the hub, such as `allenai/sciq`. Then
            nothing is downloaded. `None` for the hub.

    Raises:
        ArgumentError: the dataset cannot be loaded.
    """
    with quiet(), local_copies(data):
        try:
            return next(iter(manager.load(name)["tasks"].values()))
        except Exception as error:  # of many classes and libraries
            cause, reason = error, (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    where = "from the hub" if data is None else f"from {str(data)!r}"
    expected = "a network, or copies in --data" if data is None else "a copy of the dataset there"
    problem = f"of the task {name!r} cannot be loaded {where}: {reason}"
    raise ArgumentError("data", problem=problem, expected=expected) from cause


@contextmanager
def local_copies(data: Path | None) -> Iterator[None]:
    """Make lm-eval load datasets from subfolders of `data`, and never from the network; `None` changes nothing.

    `datasets.load_dataset(name)` reads the folder `name` if the working directory has one.
    """
    if data is None:
        yield
        return
    offline = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        with chdir(data):
            yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = offline


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the messages and bars of lm-eval and of what it calls."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "transformers")]
    levels, bars = [logger.level for logger in loggers], datasets.utils.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        with Path(os.devnull).open("w") as sink, redirect_stdout(sink), redirect_stderr(sink):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def seed_generators() -> None:
    """Seed the generators of Python, NumPy and PyTorch."""
    random.seed(SEED)
    np.random.seed(SEED)  # lm-eval draws from it
    torch.manual_seed(SEED)


def _standard_error(values: list[Any], mean: float) -> float | None:
    """Return the standard error of the mean of `values`; `None` if they are no numbers, or have another mean."""
    if len(values) < 2 or not all(isinstance(x, int | float) for x in values):
        return None
    if abs(sum(values) / len(values) - mean) > 1e-6:
        return None
    return stdev(values) / len(values) ** 0.5
