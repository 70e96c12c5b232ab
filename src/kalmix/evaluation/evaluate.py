"""Evaluation of a model on the tasks of a suite, which continues where an earlier one stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import PreTrainedTokenizerFast

from kalmix.evaluation.harness import load_task, run_task, task_manager
from kalmix.evaluation.judge import Judge
from kalmix.evaluation.results import Results, fingerprint
from kalmix.evaluation.suites import Unit
from kalmix.models import KalmixForCausalLM
from kalmix.training.provenance import provenance

Progress = Callable[[str, float], None]  # name of the current task, and the fraction of it that is done


@dataclass(frozen=True)
class Options:
    """Options of an evaluation.

    Attributes:
        limit: number of rows of each task; `None` for all.
        batch_size: sequences per forward pass.
        bf16: run under bfloat16 autocast.
        data: folder with copies of datasets; `None` for the hub.
    """

    limit: int | None = None
    batch_size: int = 8
    bf16: bool = False
    data: Path | None = None


def settings_of(model: KalmixForCausalLM, folder: Path, options: Options) -> dict[str, Any]:
    """Return the settings on which scores depend, for `Results`.

    Args:
        model: the model.
        folder: folder of its checkpoint.
        options: options of the evaluation.
    """
    return {
        "model": fingerprint(folder),
        "predict": model.config.predict,
        "limit": options.limit,
        "bf16": options.bf16,
        "lm_eval": version("lm_eval"),
    }


def evaluate(
    model: KalmixForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    units: Sequence[Unit],
    results: Results,
    options: Options,
    progress: Progress = lambda name, done: None,
) -> None:
    """Run the units of an evaluation that are not finished yet, and store each in `results` when it ends.

    Args:
        model: model in evaluation mode, on its device.
        tokenizer: its tokenizer.
        units: tasks, as `units_of` returns them.
        results: file of the results. Units in it are not run again.
        options: options of the evaluation.
        progress: called as `progress(name, fraction)`.

    Raises:
        ArgumentError: the dataset of a task cannot be loaded. Units before it are stored.
    """
    waiting = [unit for unit in units if unit.key not in results.tasks]
    if not waiting:
        return
    judge = Judge(model, tokenizer, batch_size=options.batch_size, bf16=options.bf16)
    manager = task_manager()
    facts = provenance(model.device)
    for number, unit in enumerate(waiting, start=len(units) - len(waiting) + 1):
        name, begin = f"{number} of {len(units)}: {unit.key}", time.monotonic()
        progress(name, 0.0)
        task = load_task(manager, unit.column.task, options.data)
        judge.progress = lambda done, name=name: progress(name, done)
        record, _ = run_task(judge, task, options.limit)
        results.add(unit.key, {**record, "seconds": round(time.monotonic() - begin, 1), "provenance": facts})
        progress(name, 1.0)
