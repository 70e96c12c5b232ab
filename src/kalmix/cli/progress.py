"""Progress bar of training: loss, tokens per second, time left."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_LINES = 10  # number of lines that a run prints if the output is no terminal
_LINE_PAUSE = 30.0  # seconds between two lines of a detailed log if the output is no terminal


class ProgressBar(TrainerCallback):
    """Trainer callback that shows a bar on a terminal and prints ten lines elsewhere; only in the first process.

    Args:
        console: where to print.
        detailed: also show step, loss, gradient norm, MFU and memory; elsewhere than on a terminal, print a line every
            30 seconds.
    """

    def __init__(self, console: Console, detailed: bool = False) -> None:
        self.console = console
        self.detailed = detailed
        self._printed = -math.inf
        self.bar: Progress | None = None
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._lines = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        weights = sum(value.numel() for value in given["model"].parameters())
        data = given["train_dataloader"].dataset
        shards = getattr(data, "shards", None)
        tokens = sum(len(block["input_ids"]) for block in data) if shards is None else sum(x.tokens for x in shards)
        gpus = torch.cuda.device_count()
        more = f", 1 of {gpus} GPUs (for more, use torchrun)" if gpus > 1 and args.world_size == 1 else ""
        text = f"{weights:,} parameters, {tokens:,} training tokens, on {args.device}{more}"
        self.console.print(text, soft_wrap=True)
        columns = (SpinnerColumn("line"), BarColumn(30), TaskProgressColumn(), TextColumn("{task.fields[status]}"))
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.bar.start()
        self.task: TaskID = self.bar.add_task("training", total=1.0, status="[dim]the first step compiles[/]")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self.bar is None or not logs:
            return
        self._last |= logs
        if not self._first:  # rates are measured from the end of the first step, which compiles
            self._first, self._began = dict(logs), time.monotonic()
        done, status = logs["progress"], self._status()
        if self.detailed:
            status = f"step {state.global_step:,}  {status}"
        self.bar.update(self.task, completed=done, status=status)
        due = self.detailed and time.monotonic() - self._printed >= _LINE_PAUSE
        if self.bar.disable and (due or int(done * _LINES) > self._lines):
            self._lines, self._printed = int(done * _LINES), time.monotonic()
            self.console.print(f"{done:4.0%}  {status}", soft_wrap=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _status(self) -> str:
        now, first, spent = self._last, self._first, time.monotonic() - self._began
        parts = [f"{now['bits_per_byte']:.2f} bits/byte"] if "bits_per_byte" in now else []
        if "eval_bits_per_byte" in now:
            parts.append(f"held-out {now['eval_bits_per_byte']:.2f}")
        if self.detailed:
            shown = {"loss": "loss {:.4f}", "grad_norm": "gradient {:.2f}", "mfu": "MFU {:.1%}"}
            shown |= {"memory_gib": "{:.1f} GiB", "learning_rate": "rate {:.2e}"}
            parts += [text.format(now[name]) for name, text in shown.items() if name in now]
        moved = now["progress"] - first["progress"]
        if moved > 0:
            left = int(spent * (1 - now["progress"]) / moved)
            parts += [
                f"{(now['tokens'] - first['tokens']) / spent:,.0f} tokens/s",
                f"{left // 60}:{left % 60:02d} left",
            ]
        return "  ".join(parts)
