"""The Hugging Face Trainer as kalmix sets it up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from kalmix.errors import ArgumentError, NonFiniteError
from kalmix.training.optimizer import parameter_groups
from kalmix.training.recipe import Recipe
from kalmix.training.saving import SafeTrainer
from kalmix.training.schedule import Schedule

UNLIMITED_STEPS = 10**9  # steps of a run that only the clock ends


def process_state() -> PartialState:
    """The processes that train together: those of `torchrun`, or this one alone."""
    return PartialState(cpu=not torch.accelerator.is_available())


class KalmixTrainer(SafeTrainer):
    """The Hugging Face Trainer with our parameter groups, our schedule, and logs that say more.

    Each row of the log carries `progress` (0 to 1) and `tokens` seen; a loss is followed by its `bits_per_byte`.
    """

    def __init__(
        self,
        recipe: Recipe,
        schedule: Schedule,
        tokens_per_byte: dict[str, float],
        inputs: dict[str, str],
        **options: Any,
    ) -> None:
        """Args:
        recipe: of the run.
        schedule: also among the callbacks.
        tokens_per_byte: tokens a byte of what a loss is of: "loss" of training, "eval_loss" of held-out text.
        inputs: digests of the text and the tokenizer.
        options: of `Trainer`.
        """
        self.recipe: Recipe = recipe
        self.schedule: Schedule = schedule
        self.tokens_per_byte: dict[str, float] = tokens_per_byte
        self.inputs: dict[str, str] = inputs
        super().__init__(**options)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = parameter_groups(
                model or self.accelerator.unwrap_model(self.model),
                learning_rate=self.recipe.learning_rate,
                weight_decay=self.recipe.weight_decay,
            )
            self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=True)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.schedule.lr_factor)
        return self.lr_scheduler

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        try:
            return super().compute_loss(*args, **options)
        except NonFiniteError as error:
            raise self._divergence_error() from error  # a filter refuses such signals before there is a loss

    def _divergence_error(self) -> ArgumentError:
        got = f"{self.recipe.learning_rate:g}, at which training diverged in step {self.state.global_step}"
        return ArgumentError("learning_rate", got=got, expected="lower")

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            raise self._divergence_error()
        bits = {
            name.replace("loss", "bits_per_byte"): logs[name] * tokens_per_byte / math.log(2)
            for name, tokens_per_byte in self.tokens_per_byte.items()
            if name in logs
        }
        tokens = self.state.global_step * self.recipe.seq_len * self.recipe.grad_accum
        tokens *= self.args.per_device_train_batch_size * self.args.world_size
        super().log({**logs, **bits, "tokens": tokens, "progress": self.schedule.progress}, *args, **options)


def training_arguments(recipe: Recipe, output: Path, *, batch_size: int) -> TrainingArguments:
    """What the Trainer is told; `batch_size` is of each process."""
    return TrainingArguments(
        output_dir=str(output / "checkpoints"),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.grad_accum,
        max_steps=UNLIMITED_STEPS if recipe.steps is None else recipe.steps,
        max_grad_norm=1.0,
        bf16=recipe.bf16,
        use_cpu=not torch.accelerator.is_available(),
        torch_compile=recipe.compile,
        seed=recipe.seed,
        logging_steps=10 if torch.cuda.is_available() else 1,  # reading a loss waits for the GPU
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="no",
        save_total_limit=2,
        eval_strategy="no",
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def tensorboard_callbacks(output: Path, main: bool) -> list[TrainerCallback]:
    """Curves for TensorBoard, from the main process only."""
    if not main:
        return []
    return [TensorBoardCallback(SummaryWriter(str(output / "tensorboard")))]
