"""How far a run is, from steps or from the clock, and what follows from it: the rate, the looks back, the end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

EVALUATIONS = 10  # evaluations a run, the last at its end
SAVE_INTERVALS = 5  # fractions of a run, after each of which but the last it saves a checkpoint
MAX_SECONDS_BETWEEN_SAVES = 600.0  # seconds between two checkpoints, at most


class Schedule(TrainerCallback):
    """Progress from 0 to 1, by steps, by the clock, or by whichever is further; the rate is a function of it.

    The clock starts counting after the first step, which compiles; so a budget of minutes is met, and the rate has
    fallen to zero when it is. Every process of a distributed run agrees on progress, hence on rate and end.
    """

    def __init__(self, *, steps: int | None, minutes: float | None, warmup: float, cooldown: float) -> None:
        self.steps: int | None = steps
        self.seconds: float | None = None if minutes is None else 60 * minutes
        self.warmup: float = warmup
        self.cooldown: float = cooldown
        self.progress: float = 0.0
        self.interrupted: bool = False
        self.finished: bool = False
        self._initial_progress = self._previous_progress = 0.0
        self._start_time = self._first_step_time = self._save_time = time.monotonic()
        self._timing_started = self._save_due = False

    def lr_factor(self, _: int = 0) -> float:
        """The learning rate at this progress, as a part of its peak: a trapezoid."""
        rising = self.progress / self.warmup if self.warmup else 1.0
        falling = (1 - self.progress) / self.cooldown if self.cooldown else 1.0
        return max(0.0, min(1.0, rising, falling))

    def seconds_left(self) -> float | None:
        """What is left by the clock; None if nothing limits it."""
        if self.seconds is None:
            return None
        return max(0.0, self._start_time + self.seconds * (1 - self._initial_progress) - time.monotonic())

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._initial_progress = self.progress = next(
            (row["progress"] for row in reversed(state.log_history) if "progress" in row), 0.0
        )
        self._start_time = self._first_step_time = self._save_time = time.monotonic()
        self._timing_started = False

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Before the rate is set for the next step."""
        if not self._timing_started:
            self._timing_started, self._first_step_time = True, time.monotonic()
        save_due = time.monotonic() - self._save_time >= MAX_SECONDS_BETWEEN_SAVES
        local = [self._progress_at(state.global_step + 1), float(self.interrupted), float(save_due)]
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
        control.should_save = self.interrupted or (save and not self.finished)
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
        """Whether this step passed one of `marks` evenly spaced marks."""
        return int(self.progress * marks) > int(self._previous_progress * marks)


@contextmanager
def interruptible(schedule: Schedule) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a run after the step in hand; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def interrupt(number: int, _: Any) -> None:
        schedule.interrupted = True
        signal.signal(number, handlers[number])

    for number in handlers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
