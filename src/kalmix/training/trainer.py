"""Hugging Face Trainer with the parameter groups, the schedule and the logs of kalmix."""

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
from kalmix.models.optimizer import optimizer_groups
from kalmix.training.recipe import Recipe
from kalmix.training.saving import SafeTrainer
from kalmix.training.schedule import Schedule

UNLIMITED_STEPS = 10**9  # of a run with a time limit only


def process_state() -> PartialState:
    """Return the processes that train together: those that `torchrun` started, or this one alone."""
    return PartialState(cpu=not torch.accelerator.is_available())


class KalmixTrainer(SafeTrainer):
    """Hugging Face Trainer with the parameter groups and the schedule of kalmix.

    Each row of its log has `progress` (0 to 1) and `tokens` (training tokens seen), and `bits_per_byte` beside each
    loss.

    Args:
        recipe: recipe of the run.
        schedule: schedule of the run; must also be in `callbacks`.
        tokens_per_byte: tokens per byte of the text behind each loss: "loss" for training, "eval_loss" for held-out
            text.
        inputs: digests of text and tokenizer, stored in checkpoints.
        options: other arguments of `Trainer`.

    Raises:
        ArgumentError: in training, if the loss is no longer finite.
    """

    def __init__(
        self,
        recipe: Recipe,
        schedule: Schedule,
        tokens_per_byte: dict[str, float],
        inputs: dict[str, str],
        **options: Any,
    ) -> None:
        self.recipe: Recipe = recipe
        self.schedule: Schedule = schedule
        self.tokens_per_byte: dict[str, float] = tokens_per_byte
        self.inputs: dict[str, str] = inputs
        super().__init__(**options)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = optimizer_groups(
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

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Compute the loss, without logits; raise `ArgumentError` if a signal is not finite."""
        try:
            return super().compute_loss(model, {**inputs, "skip_logits": True}, *args, **options)
        except NonFiniteError as error:
            raise self._divergence_error() from error  # ops reject such signals before there is a loss

    def _divergence_error(self) -> ArgumentError:
        got = f"{self.recipe.learning_rate:g}, at which training diverged in step {self.state.global_step}"
        return ArgumentError("learning_rate", got=got, expected="a lower one")

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log a row with progress, tokens and bits per byte; raise `ArgumentError` if its loss is not finite."""
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
    """Build the `TrainingArguments` of a run.

    Args:
        recipe: recipe of the run.
        output: folder of the run.
        batch_size: sequences per batch in each process.
    """
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
    """Return the callback that writes curves for TensorBoard, in the main process only."""
    if not main:
        return []
    return [TensorBoardCallback(SummaryWriter(str(output / "tensorboard")))]
