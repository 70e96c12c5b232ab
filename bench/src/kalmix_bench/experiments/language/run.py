"""One cell: train with `kalmix.training`, test the model in the same process, and return the row of results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import logging

from kalmix.errors import ArgumentError
from kalmix.models import KalmixForCausalLM
from kalmix.training.run import finished, read_history, train
from kalmix.training.shards import Shards
from kalmix_bench.experiments.language import probes
from kalmix_bench.experiments.language.protocol import LONGER, MAIN, LanguageCell
from kalmix_bench.runner.cells import Row
from kalmix_bench.runner.experiment import CellStopped, ProgressFn

CURVE_POINTS = 200  # of the training loss in a row
TRAINING = 0.95  # fraction of a cell's progress that is training


class ProgressCallback(TrainerCallback):
    """Callback that reports each step, and stores a checkpoint and stops if requested.

    Args:
        on_progress: receives the progress; returns whether the cell must stop.
    """

    def __init__(self, on_progress: ProgressFn) -> None:
        self.on_progress: ProgressFn = on_progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loss = next((row["loss"] for row in reversed(state.log_history) if "loss" in row), float("nan"))
        stop = self.on_progress(TRAINING * state.global_step / state.max_steps, f"loss {loss:.4f}")
        if stop and state.global_step < state.max_steps:
            control.should_save = control.should_log = control.should_training_stop = True


def run_cell(cell: LanguageCell, shards: Path, folder: Path, on_progress: ProgressFn) -> Row:
    """Train a model, or continue from its checkpoint in `folder`, test it, and return its row.

    A run that diverges is finished: its row has `diverged` in place of results.

    Args:
        cell: layer, size, learning rate and seed.
        shards: folder of token shards.
        folder: folder of the run.
        on_progress: receives the progress; returns whether the cell must stop.

    Raises:
        CellStopped: `on_progress` returned true; a checkpoint is in `folder`.
        ArgumentError: the shards do not fit the recipe, or another process trains into `folder`.
    """
    logging.disable_progress_bar()
    recipe = cell.recipe(str(shards))
    parameters = cell.estimate().parameters
    if finished(read_history(folder)):  # stopped while it was tested
        history, model = read_history(folder), KalmixForCausalLM.from_pretrained(folder / "model")
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    else:
        try:
            run = train(recipe, folder, resume=True, callbacks=[ProgressCallback(on_progress)])
        except ArgumentError as error:
            if error.name != "learning_rate":
                raise
            on_progress(1.0, "diverged")
            return {"parameters": parameters, "diverged": str(error)}
        if not run.finished:
            raise CellStopped
        history, model = run.history, run.model
    row = {"parameters": parameters, **summarize(history, Shards(shards).tokens)}
    if cell.stage == MAIN:
        on_progress(TRAINING, "testing")
        row |= evaluate(cell, model, shards)
    on_progress(1.0, f"held-out loss {row['loss']:.4f}")
    return row


def summarize(history: Sequence[dict[str, Any]], corpus_tokens: int) -> Row:
    """Return the results in the log of a run.

    Seconds are those of training steps: without compilation, evaluations, checkpoints and time between sessions.

    Args:
        history: log of the Trainer.
        corpus_tokens: training tokens of the corpus.
    """
    training = [row for row in history if "loss" in row]
    held_out = [row for row in history if "eval_loss" in row]
    tokens, seconds = training_seconds(training)
    rates = [row["tokens_per_second"] for row in training if "tokens_per_second" in row]
    mfu = [row["mfu"] for row in training if "mfu" in row]
    memory = [row["memory_gib"] for row in training if "memory_gib" in row]
    at = [row["tokens"] for row in held_out]
    keep = np.unique(np.linspace(0, len(training) - 1, min(CURVE_POINTS, len(training))).round().astype(int))
    return {
        "loss": held_out[-1]["eval_loss"],
        "bits_per_byte": held_out[-1].get("eval_bits_per_byte"),
        "tokens": int(tokens[-1]),
        "epochs": tokens[-1] / corpus_tokens,
        "training_seconds": round(float(seconds[-1]), 2),
        "tokens_per_second": round(statistics.median(rates)) if rates else None,
        "mfu": statistics.median(mfu) if mfu else None,
        "training_memory_gib": max(memory) if memory else None,
        "held_out": {
            "tokens": at,
            "seconds": _rounded(np.interp(at, tokens, seconds)),
            "loss": _rounded([row["eval_loss"] for row in held_out]),
        },
        "curve": {
            "tokens": [int(tokens[n]) for n in keep],
            "seconds": _rounded([seconds[n] for n in keep]),
            "loss": _rounded([training[n]["loss"] for n in keep]),
        },
    }


def training_seconds(rows: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of rows with a training loss, and the seconds of training until then.

    A row without a rate, such as the first of a session, has that of the next row with one.
    """
    tokens = np.array([row["tokens"] for row in rows], float)
    rates = np.array([row.get("tokens_per_second", np.nan) for row in rows], float)
    known = np.flatnonzero(np.isfinite(rates))
    if not len(known):
        return tokens, np.full(len(tokens), np.nan)
    following = known[np.minimum(np.searchsorted(known, np.arange(len(rows))), len(known) - 1)]
    return tokens, np.cumsum(np.diff(tokens, prepend=0.0) / rates[following])


def evaluate(cell: LanguageCell, model: KalmixForCausalLM, shards: Path) -> Row:
    """Return the results of all tests of `probes`, in the precision of the training."""
    size, held_out = cell.size, Shards(shards, "held_out")
    tokenizer, bos = AutoTokenizer.from_pretrained(shards / "tokenizer"), held_out.manifest.bos_id
    longest = LONGER * size.seq_len
    documents = probes.long_documents(held_out, longest + 1, size.probe_rows)
    was_training = model.training
    model.eval()
    with torch.autocast(model.device.type, torch.bfloat16, enabled=size.bf16):
        row = {
            "positions": probes.loss_by_position(model, documents, size.seq_len),
            "copying": probes.copying(model, held_out, size.seq_len, size.probe_rows),
            "recall": probes.recall(model, tokenizer, bos, size.seq_len, size.probe_rows),
            **probes.decoding(model, documents[:, :-1], (size.seq_len, longest)),
        }
    model.train(was_training)
    return row


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
