"""Hugging Face Trainer with the parameter groups, the schedule and the logs of kalmix."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from kalmix.distributed import ContextParallel
from kalmix.distributed.sharding import DYNAMICS, keep_float32
from kalmix.errors import ArgumentError, NonFiniteError
from kalmix.models.optimizer import optimizer_groups
from kalmix.segments import Segments
from kalmix.training.estimates import flops_per_token, peak_flops
from kalmix.training.recipe import Recipe
from kalmix.training.run_data import RunData
from kalmix.training.saving import SafeTrainer
from kalmix.training.schedule import Schedule

UNLIMITED_STEPS = 10**9  # of a run with a time limit only
NORM_GROWTH = 30.0  # growth of the gradient norm from which a warning is given


def process_state() -> PartialState:
    """Return the processes that train together: those that `torchrun` started, or this one alone."""
    return PartialState(cpu=not torch.accelerator.is_available())


def has_fsdp() -> bool:
    """Return whether accelerate can shard parameters on this machine."""
    return torch.cuda.is_available()


def check_fsdp(recipe: Recipe) -> None:
    """Check that the parameters can be sharded if the recipe asks for it. The process group has been started.

    Raises:
        ArgumentError: there is no GPU, or torchrun has not started this process.
    """
    if recipe.fsdp and not has_fsdp():
        raise ArgumentError("fsdp", got=True, expected="False on a machine without a GPU")
    if recipe.fsdp and not dist.is_initialized():
        hint = "On one GPU, set it to false, or use `torchrun --nproc-per-node 1`"
        raise ArgumentError("fsdp", got=True, expected="False without torchrun", hint=hint)


class KalmixTrainer(SafeTrainer):
    """Hugging Face Trainer with the parameter groups and the schedule of kalmix.

    Each row of its log has `progress` (0 to 1) and `tokens` (training tokens seen), and `bits_per_byte` beside each
    loss. Rows with a training loss have `grad_norm` and, but for the first, `tokens_per_second` of all processes since
    the row before, without evaluations and checkpoints. On a GPU they have `memory_gib`, the peak of this process, and,
    if the peak rate of the GPU is known, `mfu`, the model FLOPs utilization (`kalmix.training.estimates`).
    A warning is given once if the gradient norm of a row is 30 times that of the first row (or 30, if that is higher).

    Args:
        recipe: recipe of the run.
        schedule: schedule of the run; must also be in `callbacks`.
        data: data of the run.
        inputs: digests of data and tokenizer, stored in checkpoints.
        options: other arguments of `Trainer`.

    Raises:
        ArgumentError: in training, if the loss is no longer finite.
    """

    _checked_float32 = False

    def __init__(
        self,
        recipe: Recipe,
        schedule: Schedule,
        data: RunData,
        inputs: dict[str, str],
        **options: Any,
    ) -> None:
        self.recipe: Recipe = recipe
        self.settings = recipe
        self.schedule: Schedule = schedule
        self.data: RunData = data
        self.inputs: dict[str, str] = inputs
        self.keep_steps = recipe.keep_steps
        self._timed: tuple[int, float] | None = None  # step and time of the last row with a training loss
        self._peak: float | None = None
        self._mesh: DeviceMesh | None = None  # of context parallelism
        self._norm_grew = False  # a warning was given
        super().__init__(**options)
        if torch.cuda.is_available():
            self._peak = peak_flops(torch.cuda.get_device_name(), recipe.bf16)
        model = options["model"]
        self.flops_per_token: float = flops_per_token(model, recipe.seq_len)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            recipe, scale = self.recipe, self.recipe.lr_scale(self.data.batching.step_tokens)
            groups = optimizer_groups(
                model or self.accelerator.unwrap_model(self.model),
                learning_rate=scale * recipe.learning_rate,
                weight_decay=recipe.weight_decay,
                learning_rates={name: scale * rate for name, rate in recipe.learning_rates.items()},
                weight_decays=recipe.weight_decays,
            )
            self.optimizer = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps, fused=True)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.schedule.lr_factor)
        return self.lr_scheduler

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader() if self.data.loader is None else self.data.loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return a sampler whose epochs are whole optimizer steps: the Trainer ends an epoch with an incomplete one."""
        if self.data.loader is not None:
            return super()._get_train_sampler(train_dataset)
        dataset: Any = self.data.train
        step = self.data.batching.step_tokens // self.recipe.seq_len  # sequences
        return RandomSampler(dataset, num_samples=max(1, len(dataset) // step) * step)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        if self.data.loader is None:
            drop_last, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False  # it is for training
            try:
                return super().get_eval_dataloader(eval_dataset)
            finally:
                self.args.dataloader_drop_last = drop_last
        return DataLoader(self.data.evaluation, batch_size=None)  # pyright: ignore[reportArgumentType]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the batches of a step, and their number of targets on the device."""
        # Batches of a text are on the device already. Several processes add up their counts there.
        if self.data.loader is None or self.args.world_size > 1:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, torch.device("cpu"))
        return batches, self._prepare_input(count)

    def _prepare_input(self, data: Any) -> Any:
        """Move tensors to the GPU from pinned memory: a copy from other memory waits for the GPU to finish its work."""
        if isinstance(data, torch.Tensor) and data.device.type == "cpu" and self.args.device.type == "cuda":
            data = data.pin_memory().to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Compute the loss, without logits; raise `ArgumentError` if a signal is not finite."""
        if self.recipe.fsdp and not self._checked_float32:  # compiled models do not check it themselves
            keep_float32(self.accelerator.unwrap_model(model), DYNAMICS)
            self._checked_float32 = True
        try:
            return super().compute_loss(model, {**inputs, "skip_logits": True}, *args, **options)
        except NonFiniteError as error:
            raise self._divergence_error() from error  # ops reject such signals before there is a loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Compute loss and gradients of a batch, whose tokens `recipe.context_parallel` processes divide."""
        size = self.recipe.context_parallel
        if size == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None:  # each of these processes has counted the whole batch
            num_items_in_batch = num_items_in_batch / size
        with self._divide_tokens(inputs) as own:
            return super().training_step(model, own, num_items_in_batch)

    @contextmanager
    def _divide_tokens(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Enter context parallelism; yield the tokens of this process."""
        if self._mesh is None:
            sizes = self.data.batching.groups, self.recipe.context_parallel
            self._mesh = init_device_mesh(self.args.device.type, sizes, mesh_dim_names=("dp", "cp"))
        ends = inputs.get("cu_seq_lens_q")
        segments = None if ends is None else Segments.packed(ends)
        layout, attention = self.recipe.context_layout, self.recipe.context_attention
        with ContextParallel(self._mesh["cp"], layout, segments, attention) as cp:
            names = ("input_ids", "labels", "shift_labels")  # positions follow from the segments
            yield {name: cp.shard(inputs[name]) for name in names}

    def _divergence_error(self) -> ArgumentError:
        got = f"{self.recipe.learning_rate:g}, at which training diverged in step {self.state.global_step}"
        return ArgumentError("learning_rate", got=got, expected="a lower one")

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log a row with progress, tokens and bits per byte; raise `ArgumentError` if its loss is not finite."""
        if not math.isfinite(logs.get("loss", 0.0)):
            raise self._divergence_error()
        bits = {
            name.replace("loss", "bits_per_byte"): logs[name] * tokens_per_byte / math.log(2)
            for name, tokens_per_byte in self.data.tokens_per_byte.items()
            if name in logs
        }
        if "loss" in logs:
            self._check_norm(logs.get("grad_norm"))
            logs = {**logs, **self._rates()}
        tokens = self.state.global_step * self.data.batching.step_tokens
        super().log({**logs, **bits, "tokens": tokens, "progress": self.schedule.progress}, *args, **options)

    def _check_norm(self, norm: float | None) -> None:
        """Warn if this gradient norm is much larger than that of the first row."""
        first = next((row["grad_norm"] for row in self.state.log_history if "grad_norm" in row), norm)
        if norm is None or first is None or self._norm_grew or norm <= NORM_GROWTH * max(first, 1.0):
            return
        self._norm_grew = True
        if self.is_world_process_zero():
            warnings.warn(
                f"the gradient norm rose from {first:.3g} to {norm:.3g} in step {self.state.global_step}; if the loss "
                f"stays high, use a longer `warmup` (now {self.recipe.warmup:g}) or a lower `learning_rate`",
                stacklevel=2,
            )

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        if self.data.evaluation is None:
            return {}
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with self._untimed(), torch.random.fork_rng(gpus):  # evaluations do not change the samples of the loss
            return super().evaluate(*args, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._untimed():
            super()._save_checkpoint(model, trial)

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Leave the time inside the block out of the rates."""
        began = time.monotonic()
        yield
        if self._timed is not None:
            self._timed = self._timed[0], self._timed[1] + time.monotonic() - began

    def _rates(self) -> dict[str, float]:
        """Return tokens per second and MFU since the last call, and the peak of memory in GiB."""
        before, self._timed = self._timed, (self.state.global_step, time.monotonic())
        found: dict[str, float] = {}
        if before is not None and self._timed[0] > before[0]:
            steps, seconds = self._timed[0] - before[0], self._timed[1] - before[1]
            rate = steps * self.data.batching.step_tokens / max(seconds, 1e-9)
            found["tokens_per_second"] = rate
            if self._peak is not None:
                found["mfu"] = rate * self.flops_per_token / (self._peak * self.args.world_size)
        if torch.cuda.is_available():
            found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return found


def training_arguments(recipe: Recipe, output: Path, data: RunData) -> TrainingArguments:
    """Build the `TrainingArguments` of a run.

    Args:
        recipe: recipe of the run.
        output: folder of the run.
        data: data of the run.
    """
    steps = data.batching.steps
    # With several processes, an incomplete batch is filled up with sequences that then count twice.
    sequences = None
    if data.loader is None and data.evaluation is not None:
        sequences = len(data.evaluation)  # pyright: ignore[reportArgumentType]
    fsdp: dict[str, Any] = {}
    if recipe.fsdp:
        fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    return TrainingArguments(
        output_dir=str(output / "checkpoints"),
        per_device_train_batch_size=data.batching.rows,
        per_device_eval_batch_size=recipe.batch_size if sequences is None else min(recipe.batch_size, sequences),
        gradient_accumulation_steps=data.batching.accumulation,
        max_steps=UNLIMITED_STEPS if steps is None else steps,
        max_grad_norm=recipe.clip or 0.0,
        # `KalmixTrainer` makes the optimizer; TensorBoard, wandb and others log these.
        learning_rate=recipe.lr_scale(data.batching.step_tokens) * recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        adam_epsilon=recipe.eps,
        run_name=output.resolve().name,
        bf16=recipe.bf16,
        use_cpu=not torch.accelerator.is_available(),
        torch_compile=recipe.compile,
        seed=recipe.seed,
        logging_steps=10 if torch.cuda.is_available() else 1,  # reading a loss waits for the GPU
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="no",
        save_total_limit=recipe.keep_checkpoints,
        eval_strategy="no",
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        accelerator_config={"non_blocking": torch.cuda.is_available()},  # without waiting for the GPU
        remove_unused_columns=False,
        ignore_data_skip=data.loader is not None,  # it goes to its position by itself
        report_to=[name for name in recipe.report_to if name != "tensorboard"] or "none",
        disable_tqdm=True,
        **fsdp,
        log_level="error",
    )


def tensorboard_callbacks(output: Path, main: bool) -> list[TrainerCallback]:
    """Return the callback that writes curves for TensorBoard, in the main process only."""
    if not main:
        return []
    return [TensorBoardCallback(SummaryWriter(str(output / "tensorboard")))]
