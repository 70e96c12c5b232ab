"""Training of a benchmark model with the Hugging Face Trainer, with little overhead per step."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import accelerate.optimizer
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import PrinterCallback, TrainingArguments

from kalmix.models.losses import IGNORE_INDEX
from kalmix.training.checkpoints import newest_checkpoint
from kalmix.training.saving import SafeTrainer
from kalmix_bench import datasets
from kalmix_bench.experiments.recall.data import Batches, CellData, TensorBatch
from kalmix_bench.experiments.recall.evaluation_callback import EvaluationCallback
from kalmix_bench.experiments.recall.protocol import RecallCell, RecallProtocol
from kalmix_bench.runner.experiment import CellStopped, ProgressFn

TOKENS = 1 << 18  # tokens of test or validation rows per evaluation batch, at most
LOGITS = 1 << 27  # their logits, at most: 512 MiB in float32, since several processes share a GPU


def learning_rate_factor(protocol: RecallProtocol, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate after `step` steps as a fraction of its peak."""
    steps = protocol.epochs * steps_per_epoch
    if protocol.schedule == "constant":
        return 1.0
    if protocol.schedule == "cosine":
        done = (step // steps_per_epoch) / protocol.epochs
    elif step < protocol.warmup:
        return (step + 1) / protocol.warmup
    else:
        done = (step - protocol.warmup) / max(1, steps - protocol.warmup)
    least = protocol.min_learning_rate / protocol.learning_rate
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))


def masked_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the float32 cross entropy of the targets that are not -100."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE_INDEX)


class CellTrainer(SafeTrainer):
    """Trainer with rows on the device and a minimal training step.

    The Trainer's own `training_step` supports many configurations. With rows on the device and no accumulation, a step
    is one forward and one backward pass.
    """

    def __init__(
        self,
        cell: RecallCell,
        data: CellData,
        model: nn.Module,
        evaluation: EvaluationCallback,
        args: TrainingArguments,
    ) -> None:
        protocol, self.cell, self.net, self.graphs, self.inputs = cell.protocol, cell, model, {}, {}
        self.evaluation = evaluation
        self.parameters: list[nn.Parameter] = list(model.parameters())
        self.fallbacks: list[str] = []  # why steps are not compiled or not captured
        self.batches = Batches(data, protocol.batch_size, shuffle=protocol.shuffle, seed=cell.seed, device=args.device)
        self.evaluation_tokens: int = max(1, min(TOKENS, LOGITS // data.vocab_size))
        self.total = torch.zeros((), device=args.device)  # sum of the losses of an epoch
        super().__init__(model=model, args=args, callbacks=[evaluation])
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> Any:
        return self.batches

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            protocol = self.cell.protocol
            self.optimizer = torch.optim.AdamW(
                self.net.parameters(),
                lr=protocol.learning_rate,
                betas=protocol.betas,
                weight_decay=protocol.weight_decay,
                fused=True,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            protocol, steps_per_epoch = self.cell.protocol, len(self.batches)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: learning_rate_factor(protocol, step, steps_per_epoch)
            )
        return self.lr_scheduler

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Store the weights of a checkpoint. Shared weights are stored once, which the Trainer does not support."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.net, str(folder / "model.safetensors"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_model(self.net, Path(resume_from_checkpoint) / "model.safetensors")

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip gradients as the Trainer does, without looking for gradients of several meshes at each step."""
        return nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        captured = self.cell.protocol.cuda_graph and self.args.device.type == "cuda"
        loss = self._replay(**inputs) if captured else self._step(model, **inputs)
        self.total += loss
        return loss

    def _step(
        self, model: Callable[..., Tensor], inputs: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.cell.protocol.bf16):
            logits = model(inputs) if positions is None else model(inputs, positions)
        if positions is not None:
            targets = targets.gather(1, positions)
        loss = masked_cross_entropy(logits, targets)
        loss.backward()
        return loss.detach()

    def _replay(self, inputs: Tensor, **others: Tensor) -> Tensor:
        """Run a step as a CUDA graph, one per batch shape; gradients stay at their first addresses.

        Steps are compiled. If that fails, or a graph cannot be captured, plain steps are captured or run.
        """
        batch = {"inputs": inputs, **others}
        if inputs.shape not in self.graphs:
            began = time.monotonic()
            self.graphs[inputs.shape] = self._capture_any({name: x.clone() for name, x in batch.items()})
            self.evaluation.leave_out_compilation(time.monotonic() - began)
        if self.graphs[inputs.shape] is None:
            return self._step(self.net, **batch)
        graph, buffers, loss, gradients = self.graphs[inputs.shape]
        for name, x in batch.items():
            buffers[name].copy_(x)
        graph.replay()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return loss

    def _capture_any(self, batch: TensorBatch) -> tuple[Any, ...] | None:
        """Capture a compiled step, or else a plain one; return `None` and store the reasons if neither works."""
        if not self.graphs:
            torch.compiler.reset()  # graphs of earlier cells count towards the recompile limit
        for kind, model in (("compiled", torch.compile(self.net, dynamic=False)), ("captured", self.net)):
            try:
                return self._capture(model, batch)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any compiler; steps are correct without it
                self.net.zero_grad()
                torch.cuda.synchronize()  # raises if the error has broken the process
                lines = str(error).strip().splitlines() or [""]
                reason = (
                    f"steps {tuple(batch['inputs'].shape)} are not {kind}: {type(error).__name__}: {lines[0][:200]}"
                )
                self.fallbacks.append(reason)
        return None

    def _capture(self, model: Callable[..., Tensor], batch: TensorBatch) -> tuple[Any, ...]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.random.fork_rng([self.args.device]):
            for _ in range(3):  # compile and allocate before the capture
                self._step(model, **batch)
                self.net.zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._step(model, **batch)
        return graph, batch, loss, [(x, x.grad) for x in self.net.parameters() if x.grad is not None]

    def predict_rows(self, rows: datasets.Rows) -> tuple[float, Any]:
        """Return the mean loss per scored token of `rows`, and the predicted ids, `[n, T]`."""
        inputs, targets = (torch.from_numpy(x).to(self.args.device) for x in (rows.inputs, rows.targets))
        losses, predictions, count = [], [], max(1, self.evaluation_tokens // inputs.shape[1])
        self.net.eval()
        with torch.no_grad(), torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.cell.protocol.bf16):
            for x, y in zip(inputs.split(count), targets.split(count), strict=True):
                logits = self.net(x)
                losses.append(masked_cross_entropy(logits, y) * (y != IGNORE_INDEX).sum())
                predictions.append(logits.argmax(-1))
        self.net.train()
        scored = max(1, int((rows.targets != IGNORE_INDEX).sum()))
        return float(torch.stack(losses).sum()) / scored, torch.cat(predictions).cpu().numpy()


@contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def _one_look_for_lomo() -> Iterator[None]:
    """Keep accelerate from searching for the package `lomo_optim` twice at each step, which takes 0.6 ms."""
    before = accelerate.optimizer.is_lomo_available
    accelerate.optimizer.is_lomo_available = cache(before)
    try:
        yield
    finally:
        accelerate.optimizer.is_lomo_available = before


def train_cell(
    cell: RecallCell,
    data: CellData,
    model: nn.Module,
    device: torch.device,
    on_progress: ProgressFn,
    checkpoints: Path | None = None,
) -> EvaluationCallback:
    """Train `model` by the protocol of `cell`, resuming from the newest intact checkpoint in `checkpoints`.

    Args:
        cell: cell to train.
        data: its rows.
        model: freshly initialized model on `device`.
        device: device to train on.
        on_progress: receives the progress.
        checkpoints: folder of checkpoints; a temporary one by default.

    Returns:
        The evaluation callback, with curves and scores.

    Raises:
        NonFiniteError: the loss diverged.
        CellStopped: `on_progress` returned true; the newest checkpoint has the current state.
    """
    evaluation = EvaluationCallback(cell, data, on_progress)
    with _folder(checkpoints) as folder:
        trainer = CellTrainer(cell, data, model, evaluation, training_arguments(cell, folder, device))
        evaluation.trainer = trainer
        with _one_look_for_lomo():
            trainer.train_from(newest_checkpoint(folder))
    evaluation.fallbacks = trainer.fallbacks
    if evaluation.stopped:
        raise CellStopped
    return evaluation


def training_arguments(cell: RecallCell, folder: Path, device: torch.device) -> TrainingArguments:
    """Return the `TrainingArguments` of a cell."""
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=cell.protocol.epochs,
        max_grad_norm=cell.protocol.max_grad_norm or float("inf"),
        use_cpu=device.type == "cpu",
        seed=cell.seed,
        save_strategy="no",
        save_total_limit=2,
        eval_strategy="no",
        ignore_data_skip=True,  # `Batches` skips them
        logging_strategy="no",
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
