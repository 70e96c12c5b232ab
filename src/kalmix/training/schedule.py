"""Progress of a run, by steps or by time; learning rate, evaluations, checkpoints and end of the run follow from it."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

EVALUATIONS = 10  # per run, evenly spaced, the last at its end
SAVE_INTERVALS = 5  # a run saves a checkpoint after each fifth but the last


@dataclass(frozen=True)
class Curve:
    """Learning rate as a function of progress, relative to its peak.

    Attributes:
        shape: "trapezoid", "wsd" or "cosine", as `Recipe.schedule`.
        warmup: fraction of the run in which the learning rate rises linearly from 0.
        cooldown: fraction of the run at its end in which it falls; unused by "cosine".
        final: value at the end.
    """

    shape: str
    warmup: float
    cooldown: float
    final: float = 0.0

    def __call__(self, progress: float) -> float:
        """Return the learning rate at `progress`, 0 to 1."""
        rising = progress / self.warmup if self.warmup else 1.0
        if self.shape == "cosine":
            done = (progress - self.warmup) / (1 - self.warmup) if self.warmup < 1 else 0.0
            falling = (1 + math.cos(math.pi * max(0.0, min(1.0, done)))) / 2
        else:
            falling = (1 - progress) / self.cooldown if self.cooldown else 1.0
            if self.shape == "wsd":
                falling = 1 - math.sqrt(max(0.0, 1 - falling))
        falling = self.final + (1 - self.final) * max(0.0, min(1.0, falling))
        return max(0.0, min(rising, falling))


@dataclass(frozen=True)
class SaveRule:
    """Rule for checkpoints beside those after each fifth of the run.

    Attributes:
        seconds: longest time between two checkpoints.
        steps: further checkpoints after each multiple of so many steps; `None` for none.
        keep_steps: the same for checkpoints that are kept, and one after the last step; `None` for none.
    """

    seconds: float = 600.0
    steps: int | None = None
    keep_steps: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step, whatever the time."""
        return any(step % steps == 0 for steps in (self.steps, self.keep_steps) if steps is not None)


class Schedule(TrainerCallback):
    """Trainer callback that measures progress from 0 to 1, by steps, by time, or by the larger of the two.

    The learning rate is a function of progress, so it reaches its final value when the time limit ends the run. Time is
    measured after the first step, which compiles. All processes of a distributed run share one progress, and so its
    learning rate and end.

    Args:
        steps: training steps of the run; `None` for no limit.
        minutes: minutes of training; `None` for no limit.
        curve: learning rate as a function of progress.
        saves: rule for checkpoints.

    Attributes:
        progress: fraction of the run that is done.
        signalled: this process has received a signal to stop.
        interrupted: some process has received one; all stop after the current step.
        finished: the run has reached its end.
    """

    def __init__(
        self, *, steps: int | None, minutes: float | None, curve: Curve, saves: SaveRule | None = None
    ) -> None:
        self.steps: int | None = steps
        self.seconds: float | None = None if minutes is None else 60 * minutes
        self.curve: Curve = curve
        self.saves: SaveRule = saves or SaveRule()
        self.progress: float = 0.0
        self.signalled: bool = False
        self.interrupted: bool = False
        self.finished: bool = False
        self._initial_progress = self._previous_progress = 0.0
        self._start_time = self._first_step_time = self._save_time = time.monotonic()
        self._timing_started = self._save_due = False

    def lr_factor(self, _: int = 0) -> float:
        """Return the learning rate at the current progress, relative to its peak."""
        return self.curve(self.progress)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Continue at the progress of a checkpoint; that of a branch follows from its own number of steps."""
        rows = state.log_history if self.steps is not None and self.seconds is None else []
        for row in rows:
            row["progress"] = self._progress_at(int(row["step"]))
        self._initial_progress = self.progress = next(
            (row["progress"] for row in reversed(state.log_history) if "progress" in row), 0.0
        )
        self._start_time = self._first_step_time = self._save_time = time.monotonic()
        self._timing_started = False
        for group in given["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] * self.lr_factor()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Update progress; runs before the learning rate of the next step is set."""
        if not self._timing_started:
            self._timing_started, self._first_step_time = True, time.monotonic()
        save_due = time.monotonic() - self._save_time >= self.saves.seconds
        save_due |= self.saves.is_due(state.global_step + 1)
        local = [self._progress_at(state.global_step + 1), float(self.signalled), float(save_due)]
        if dist.is_available() and dist.is_initialized():
            combined = torch.tensor(local, device=args.device, dtype=torch.float64)
            dist.all_reduce(combined, dist.ReduceOp.MAX)
            local = combined.tolist()
        self._previous_progress, self.progress = self.progress, local[0]
        self.interrupted, self._save_due = bool(local[1]), bool(local[2])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.finished = self.progress >= 1
        control.should_evaluate = control.should_evaluate or self._crossed_mark(EVALUATIONS)
        save = self._save_due or self._crossed_mark(SAVE_INTERVALS)
        last = self.finished and self.saves.keep_steps is not None
        control.should_save = self.interrupted or last or (save and not self.finished)
        if control.should_save:
            self._save_time = time.monotonic()
        control.should_training_stop = control.should_training_stop or self.finished or self.interrupted
        control.should_log = control.should_log or control.should_save or control.should_training_stop

    def _progress_at(self, step: int) -> float:
        fractions = [0.0]
        if self.steps is not None:
            fractions.append(step / self.steps)
        if self.seconds is not None:
            end = self._start_time + self.seconds * (1 - self._initial_progress)
            spent = (time.monotonic() - self._first_step_time) / max(end - self._first_step_time, 1e-9)
            fractions.append(self._initial_progress + (1 - self._initial_progress) * min(1.0, spent))
        return min(1.0, max(fractions))

    def _crossed_mark(self, marks: int) -> bool:
        """Return whether this step passed one of `marks` evenly spaced marks."""
        return int(self.progress * marks) > int(self._previous_progress * marks)


@contextmanager
def interruptible(schedule: Schedule) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a run after its current step; a second signal has its usual effect.

    If a run of several processes fails, the first SIGTERM has no effect even after the block: torchrun sends it as soon
    as one process has ended, and the others must first print why they end. Only in the main thread; elsewhere signals
    are unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def interrupt(number: int, _: Any) -> None:
        schedule.signalled = True  # not `interrupted`: a signal may come while the processes agree on it
        signal.signal(number, handlers[number])

    for number in handlers:
        signal.signal(number, interrupt)
    failed = True
    try:
        yield
        failed = False
    finally:
        for number, handler in handlers.items():
            if not (failed and number == signal.SIGTERM and dist.is_initialized() and dist.get_world_size() > 1):
                signal.signal(number, handler)
