"""Judging a model of a benchmark after each epoch: scores, curves, and whether it goes on."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from kalmix.errors import NonFiniteError
from kalmix_bench import datasets as tasks
from kalmix_bench.datasets.metrics import Metric
from kalmix_bench.experiments.recall.data import Drawn
from kalmix_bench.experiments.recall.protocol import Cell
from kalmix_bench.runner.scheduler import Tell

if TYPE_CHECKING:
    from kalmix_bench.experiments.recall.trainer import CellTrainer

SAVED = 60.0  # seconds between two checkpoints
TOLD = 0.5  # seconds between two words of how far it is
FIFTHS = 5
Curves = dict[str, list[float]]


def by_depth(score: Metric, predicted: Any, test: tasks.Rows) -> dict[str, float]:
    """The score of rows whose answer stands in each fifth of them, of those that have any; of tasks that say where."""
    depth = test.facts.get("depth")
    if depth is None:
        return {}
    fifth = np.minimum((np.asarray(depth) * FIFTHS).astype(int), FIFTHS - 1)
    there = {part: fifth == part for part in range(FIFTHS) if (fifth == part).any()}
    return {f"depth {part + 1}/{FIFTHS}": score(predicted[rows], test.targets[rows]) for part, rows in there.items()}


class Judge(TrainerCallback, ExportableState):
    """Scores the test rows after each epoch, keeps the curves, and ends a run that is done or gets no better.

    Attributes:
        curves: by name, a number an epoch: `loss` of training, `test_loss`, and the task's scores, their means over
            parts.
        slices: by epoch that is chosen ("loss", "score", "last"), scores of each part.
        seconds: of training, and of judging.
    """

    def __init__(self, cell: Cell, drawn: Drawn, tell: Tell) -> None:
        self.cell, self.drawn, self.tell = cell, drawn, tell
        self.trainer: CellTrainer | None = None
        self.curves: Curves = {}
        self.slices: dict[str, list[dict[str, float]]] = {}
        self.seconds = {"training": 0.0, "judging": 0.0}
        self._began = self._saved = self._told = time.monotonic()
        self._standing = ""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"args": {}, "attributes": {"curves": self.curves, "slices": self.slices, "seconds": self.seconds}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        kept: Any = state.stateful_callbacks  # of the checkpoint, or as it is
        for name, value in kept["Judge"]["attributes"].items():
            setattr(self, name, value)

    @property
    def main(self) -> str:
        """The score that a protocol goes by."""
        return next(iter(tasks.task(self.cell.task).scores))

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if time.monotonic() - self._told > TOLD:
            self._told = time.monotonic()
            self.tell(state.global_step / state.max_steps, self._standing)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self.trainer is not None
        loss = float(self.trainer.total) / len(self.trainer.batches)
        self.trainer.total.zero_()
        self.seconds["training"] += time.monotonic() - self._began
        if not math.isfinite(loss):
            raise NonFiniteError("loss")
        scores = self._judged(loss)
        protocol, main = self.cell.protocol, self.curves[self.main]
        epochs = len(main)
        since = epochs - 1 - max(range(epochs), key=main.__getitem__)
        stale = protocol.patience is not None and since >= protocol.patience
        done = stale or scores[self.main] >= protocol.enough or epochs >= protocol.epochs
        self._standing = f"{self.main} {main[epochs - 1 - since]:.3f}"
        self.tell(1.0 if done else epochs / protocol.epochs, self._standing)
        control.should_training_stop = done
        control.should_save = not done and time.monotonic() - self._saved > SAVED
        if control.should_save:
            self._saved = time.monotonic()

    def _judged(self, loss: float) -> dict[str, float]:
        """Scores of the test rows, which go into the curves."""
        began, task, parts = time.monotonic(), tasks.task(self.cell.task), []
        assert self.trainer is not None
        for part in self.drawn.parts:
            if len(part.test):
                missed, predicted = self.trainer.predict_rows(part)
                scores = {name: score(predicted, part.test.targets) for name, score in task.scores.items()}
                parts.append({"test_loss": missed, **scores})
                parts[-1] |= by_depth(task.scores[self.main], predicted, part.test)
        means = {name: sum(part[name] for part in parts) / len(parts) for name in ("test_loss", *task.scores)}
        for name, value in {"loss": loss, **means}.items():
            self.curves.setdefault(name, []).append(value)
        lost, main = self.curves["test_loss"], self.curves[self.main]
        best = {
            "loss": lost[-1] <= min(lost),
            "score": main[-1] >= max(main) and main.index(max(main)) == len(main) - 1,
        }
        self.slices |= {name: parts for name, holds in {**best, "last": True}.items() if holds}
        self.seconds["judging"] += time.monotonic() - began
        return means
