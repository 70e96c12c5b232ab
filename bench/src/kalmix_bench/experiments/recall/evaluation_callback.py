"""Trainer callback that evaluates a benchmark model after each epoch and decides when training ends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from kalmix.errors import NonFiniteError
from kalmix_bench import datasets
from kalmix_bench.datasets.metrics import Metric
from kalmix_bench.experiments.recall.data import Batches, CellData
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.runner.experiment import ProgressFn

CHECKPOINT_SECONDS = 60.0
REPORT_SECONDS = 0.5
FIFTHS = 5
Curves = dict[str, list[float]]


def by_depth(score: Metric, predicted: Any, test: datasets.Rows) -> dict[str, float]:
    """Return the score of rows by the depth of their answer, in fifths; empty if the task has no depths."""
    depth = test.metadata.get("depth")
    if depth is None:
        return {}
    fifth = np.minimum((np.asarray(depth) * FIFTHS).astype(int), FIFTHS - 1)
    masks = {part: fifth == part for part in range(FIFTHS) if (fifth == part).any()}
    return {f"depth {part + 1}/{FIFTHS}": score(predicted[rows], test.targets[rows]) for part, rows in masks.items()}


class EvaluationTrainer(Protocol):
    """Trainer whose model an `EvaluationCallback` evaluates."""

    batches: Batches
    total: Tensor  # sum of the losses of an epoch

    def predict_rows(self, rows: datasets.Rows) -> tuple[float, Any]:
        """Return the mean loss per scored token of `rows`, and the predicted ids, `[n, T]`."""
        ...


class EvaluationCallback(TrainerCallback, ExportableState):
    """Callback that scores test and validation rows after each epoch, and ends a run without improvement.

    Attributes:
        curves: values per epoch, by name: training `loss`, `test_loss`, and the task's scores as means over parts; for
            validation rows `validation_loss` and scores with the prefix `validation_`. With the prefix `trained_`,
            means over the parts that have training rows, if others have test rows only.
        slices: test scores of each part at the selected epochs "loss", "score" and "last". Parts with training rows
            select the epochs, and end the training. If there are validation rows, they do so, and "loss on test" and
            "score on test" are the epochs that test rows select.
        seconds: time of training, of evaluation, and of compilation, which the time of training leaves out.
        stopped: whether the run stored a checkpoint and stopped because `on_progress` returned true.
        fallbacks: why steps on a GPU were not compiled or not captured as a CUDA graph; empty if they were.
    """

    def __init__(self, cell: RecallCell, data: CellData, on_progress: ProgressFn) -> None:
        self.cell, self.drawn, self.on_progress = cell, data, on_progress
        self.trainer: EvaluationTrainer | None = None
        self.curves: Curves = {}
        self.slices: dict[str, list[dict[str, float]]] = {}
        self.seconds = {"training": 0.0, "evaluation": 0.0, "compilation": 0.0}
        self._began = self._saved = self.cell_key = time.monotonic()
        self.stopped = False
        self.fallbacks: list[str] = []
        self._status = ""

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, with the sum of losses of the current epoch."""
        attributes = {"curves": self.curves, "slices": self.slices, "seconds": self.seconds}
        total = 0.0 if self.trainer is None else float(self.trainer.total)
        return {"args": {"total": total}, "attributes": attributes}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self.trainer is not None
        callbacks: Any = state.stateful_callbacks  # from the checkpoint, or the current state
        for name, value in callbacks["EvaluationCallback"]["attributes"].items():
            setattr(self, name, value)
        self.trainer.total.fill_(callbacks["EvaluationCallback"]["args"].get("total", 0.0))
        self.trainer.batches.skip = state.global_step % len(self.trainer.batches)

    @property
    def main_score(self) -> str:
        """Name of the task's first score, by which epochs are selected."""
        return next(iter(datasets.get_task(self.cell.task).scores))

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self.trainer is not None
        if time.monotonic() - self.cell_key > REPORT_SECONDS:
            self.cell_key = time.monotonic()
            if self.on_progress(state.global_step / state.max_steps, self._status) and self._is_mid_epoch(state):
                self._stop(control)

    def _is_mid_epoch(self, state: TrainerState) -> bool:
        """Return whether the current epoch has steps left; after its last step it is evaluated first."""
        assert self.trainer is not None
        return state.global_step % len(self.trainer.batches) > 0

    def leave_out_compilation(self, seconds: float) -> None:
        """Count `seconds` that have passed in the current epoch as compilation, not as training."""
        self.seconds["compilation"] = self.seconds.get("compilation", 0.0) + seconds  # older checkpoints have none
        self._began += seconds

    def _stop(self, control: TrainerControl) -> None:
        """Store a checkpoint and stop."""
        self.seconds["training"] += time.monotonic() - self._began
        self.stopped = control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self.trainer is not None
        if self.stopped:
            control.should_save = False  # already saved
            return
        loss = float(self.trainer.total) / len(self.trainer.batches)
        self.trainer.total.zero_()
        self.seconds["training"] += time.monotonic() - self._began
        if not math.isfinite(loss):
            raise NonFiniteError("loss")
        self._evaluate(loss)
        protocol, main = self.cell.protocol, self.curves[self._selection_curve(self.main_score)]
        epochs = len(main)
        since = epochs - 1 - max(range(epochs), key=main.__getitem__)
        stale = protocol.patience is not None and since >= protocol.patience
        done = stale or main[-1] >= protocol.stop_score or epochs >= protocol.epochs
        self._status = f"{self.main_score} {main[epochs - 1 - since]:.3f}"
        out_of_time = self.on_progress(1.0 if done else epochs / protocol.epochs, self._status)
        self.stopped = not done and bool(out_of_time)
        control.should_training_stop = done or self.stopped
        control.should_save = self.stopped or (not done and time.monotonic() - self._saved > CHECKPOINT_SECONDS)
        if control.should_save:
            self._saved = time.monotonic()

    def _evaluate(self, loss: float) -> None:
        """Score test and validation rows; update the curves, and the slices of the epochs that are best so far."""
        began = time.monotonic()
        parts = self._score_parts(self.drawn.test)
        means = {"loss": loss, **self.mean_scores(parts)}
        selecting = self._score_parts(self.drawn.validation) if self.drawn.validation else parts
        selecting = [part for part, is_trained in zip(selecting, self._trained, strict=True) if is_trained]
        means |= {self._selection_curve(name): value for name, value in self.mean_scores(selecting).items()}
        for name, value in means.items():
            self.curves.setdefault(name, []).append(value)
        best = {
            "last": True,
            **self._is_best(self._selection_curve("test_loss"), self._selection_curve(self.main_score)),
        }
        if self.drawn.validation:
            best |= {f"{name} on test": holds for name, holds in self._is_best("test_loss", self.main_score).items()}
        self.slices |= {name: parts for name, holds in best.items() if holds}
        self.seconds["evaluation"] += time.monotonic() - began

    @property
    def _trained(self) -> list[bool]:
        """Whether each part with test rows has training rows; all true if none has."""
        found = [part.train > 0 for part in self.cell.parts if part.test > 0]
        return found if any(found) else [True] * len(found)

    def _selection_curve(self, name: str) -> str:
        """Return the name of the curve that selects epochs in place of the test curve `name`."""
        if self.drawn.validation:
            return f"validation_{name.removeprefix('test_')}"
        return name if all(self._trained) else f"trained_{name}"

    def _score_parts(self, rows: Sequence[datasets.Rows]) -> list[dict[str, float]]:
        """Return loss and scores of each part that has rows."""
        assert self.trainer is not None
        task, parts = datasets.get_task(self.cell.task), []
        for part in rows:
            if len(part):
                losses, predicted = self.trainer.predict_rows(part)
                scores = {name: score(predicted, part.targets) for name, score in task.scores.items()}
                parts.append({"test_loss": losses, **scores})
                parts[-1] |= by_depth(task.scores[self.main_score], predicted, part)
        return parts

    def mean_scores(self, parts: Sequence[dict[str, float]]) -> dict[str, float]:
        """Return loss and scores, averaged over parts."""
        names = ("test_loss", *datasets.get_task(self.cell.task).scores)
        return {name: sum(part[name] for part in parts) / len(parts) for name in names}

    def _is_best(self, loss: str, score: str) -> dict[str, bool]:
        """Return whether the last epoch has the lowest loss (the last such epoch), and the best score.

        Of epochs with equal scores, the one with the lowest loss is best: the score of a hard task stays 0 for long.
        """
        losses, scores = self.curves[loss], self.curves[score]
        best = max(range(len(scores)), key=lambda epoch: (scores[epoch], -losses[epoch]))
        return {"loss": losses[-1] <= min(losses), "score": best == len(scores) - 1}
