"""Evaluation of a model on the tasks of a suite, which continues where an earlier one stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import PreTrainedTokenizerFast

from kalmix.evaluation.harness import load_task, run_task, task_manager
from kalmix.evaluation.judge import Judge
from kalmix.evaluation.perplexity import HeldOutText, perplexity
from kalmix.evaluation.ranks import ALONE, Ranks
from kalmix.evaluation.results import Results, fingerprint
from kalmix.evaluation.ruler import Needle, deciles, load_ruler_task, needles, tokenizer_copy
from kalmix.evaluation.suites import PERPLEXITY, Unit
from kalmix.models import KalmixForCausalLM
from kalmix.training.model_folder import ModelFolder
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
        text: text of the perplexity; `None` if no unit needs it.
        ranks: processes that evaluate together. Each calls `evaluate`; process 0 stores the results.
    """

    limit: int | None = None
    batch_size: int = 8
    bf16: bool = False
    data: Path | None = None
    text: HeldOutText | None = None
    ranks: Ranks = ALONE


def settings_of(model: KalmixForCausalLM, folder: ModelFolder, options: Options) -> dict[str, Any]:
    """Return the settings on which scores depend, for `Results`.

    Args:
        model: the model.
        folder: folders of its files.
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
    waiting = [unit for unit in units if not _is_finished(unit, results, options)]
    if not waiting:
        return
    ranks = options.ranks
    judge = Judge(model, tokenizer, batch_size=options.batch_size, bf16=options.bf16, ranks=ranks)
    facts = provenance(model.device) | ({"processes": ranks.size} if ranks.size > 1 else {})
    with tokenizer_copy(tokenizer) as name:
        for number, unit in enumerate(waiting, start=len(units) - len(waiting) + 1):
            label, begin = f"{number} of {len(units)}: {unit.key}", time.monotonic()
            progress(label, 0.0)
            record = _run(judge, unit, options, name, lambda done, label=label: progress(label, done))
            if ranks.rank == 0:
                seconds = round(time.monotonic() - begin, 1)
                results.add(unit.key, {**record, "seconds": seconds, "provenance": facts})
            progress(label, 1.0)


def _is_finished(unit: Unit, results: Results, options: Options) -> bool:
    """Return whether there is a result of a unit; that of another text does not count."""
    record = results.tasks.get(unit.key)
    if record is None or options.text is None or unit.column.task != PERPLEXITY:
        return record is not None
    return record.get("text") == options.text.sha256


def _run(
    judge: Judge, unit: Unit, options: Options, tokenizer: str, progress: Callable[[float], None]
) -> dict[str, Any]:
    """Run a unit, and return its record. `tokenizer` is the folder of a copy of the tokenizer."""
    task, length = unit.column.task, unit.length
    loading = options.ranks.main_first() if options.data is None else nullcontext()  # one process downloads
    if length is None:
        judge.progress = progress
        with loading:
            loaded = load_task(task_manager(), task, options.data)
        return run_task(judge, loaded, options.limit)[0]
    if task == PERPLEXITY:
        assert options.text is not None
        sizes = {"batch_size": options.batch_size, "bf16": options.bf16, "ranks": options.ranks}
        return perplexity(judge.model, options.text, length, **sizes, progress=progress)
    with loading:
        loaded = load_ruler_task(task, length, options.limit, tokenizer, options.data)
    judge.progress = progress
    record, samples = run_task(judge, loaded, None)
    score = str(length)
    record["scores"], record["stderr"] = {"score": record["scores"][score]}, {"score": record["stderr"].get(score)}
    if task.startswith("niah_"):
        found = needles(samples, judge.tokenizer)
        record |= {"deciles": deciles(found), "needles": {"columns": Needle._fields, "rows": found}}
    return record
