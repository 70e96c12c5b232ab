"""Training a model of a benchmark on the Hugging Face Trainer, thousands of small steps, and judging it each epoch."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from kalmix import tasks
from kalmix.errors import NonFiniteError
from kalmix.models.losses import IGNORE
from kalmix.tasks.metrics import Metric
from kalmix.training.bench.data import Batches, Drawn
from kalmix.training.bench.protocol import Cell, Protocol
from kalmix.training.sweep import Tell

TOKENS = 1 << 18  # of test rows that are judged at once
SAVED = 60.0  # seconds between two checkpoints
TOLD = 0.5  # seconds between two words of how far it is
FIFTHS = 5
Curves = dict[str, list[float]]


def factor(protocol: Protocol, step: int, an_epoch: int) -> float:
    """The learning rate after so many steps, as a part of its peak."""
    steps = protocol.epochs * an_epoch
    if protocol.schedule == "constant":
        return 1.0
    if protocol.schedule == "cosine":
        done = (step // an_epoch) / protocol.epochs
    elif step < protocol.warmup:
        return (step + 1) / protocol.warmup
    else:
        done = (step - protocol.warmup) / max(1, steps - protocol.warmup)
    least = protocol.least / protocol.rate
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the targets that are not -100, float32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE)


def by_depth(score: Metric, predicted: Any, test: tasks.Rows) -> dict[str, float]:
    """The score of rows whose answer stands in each fifth of them, of those that have any; of tasks that say where."""
    depth = test.facts.get("depth")
    if depth is None:
        return {}
    fifth = np.minimum((np.asarray(depth) * FIFTHS).astype(int), FIFTHS - 1)
    there = {part: fifth == part for part in range(FIFTHS) if (fifth == part).any()}
    return {f"depth {part + 1}/{FIFTHS}": score(predicted[rows], test.targets[rows]) for part, rows in there.items()}


class CellTrainer(Trainer):
    """The Trainer with rows that lie on the device and steps that do no more than they must.

    Its own `training_step` asks at every step what kind of run this is; on a device of our own, without
    accumulation, a step is forward and backward.
    """

    def __init__(self, cell: Cell, drawn: Drawn, model: nn.Module, judge: Judge, args: TrainingArguments) -> None:
        protocol, self.cell, self.net, self.captures = cell.protocol, cell, model, {}
        self.batches = Batches(drawn, protocol.batch, shuffle=protocol.shuffle, seed=cell.seed, device=args.device)
        self.total = torch.zeros((), device=args.device)  # of the losses of an epoch
        super().__init__(model=model, args=args, callbacks=[judge])
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> Any:
        return self.batches

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            protocol = self.cell.protocol
            self.optimizer = torch.optim.AdamW(
                self.net.parameters(),
                lr=protocol.rate,
                betas=protocol.betas,
                weight_decay=protocol.decay,
                fused=True,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            protocol, an_epoch = self.cell.protocol, len(self.batches)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: factor(protocol, step, an_epoch)
            )
        return self.lr_scheduler

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The weights of a checkpoint, those that are shared once; the Trainer's way refuses them."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.net, str(folder / "model.safetensors"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_model(self.net, Path(resume_from_checkpoint) / "model.safetensors")

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        captured = self.cell.protocol.captured and self.args.device.type == "cuda"
        loss = self._replayed(**inputs) if captured else self._step(model, **inputs)
        self.total += loss
        return loss

    def _step(self, model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.cell.protocol.bf16):
            logits = model(inputs)
        loss = loss_of(logits, targets)
        loss.backward()
        return loss.detach()

    def _replayed(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The same, compiled, as a CUDA graph, one for each shape of batch; gradients lie where they lay at first."""
        if inputs.shape not in self.captures:
            self.captures[inputs.shape] = self._capture(inputs.clone(), targets.clone())
        graph, given, wanted, loss, gradients = self.captures[inputs.shape]
        given.copy_(inputs)
        wanted.copy_(targets)
        graph.replay()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return loss

    def _capture(self, inputs: Tensor, targets: Tensor) -> tuple[Any, ...]:
        if not self.captures:
            torch.compiler.reset()  # models of earlier cells count against how many are compiled
        read, beside = torch.compile(self.net, dynamic=False), torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside), torch.random.fork_rng([self.args.device]):
            for _ in range(3):  # compiles and allocates what there is to
                self._step(read, inputs, targets)
                self.net.zero_grad()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._step(read, inputs, targets)
        return graph, inputs, targets, loss, [(x, x.grad) for x in self.net.parameters() if x.grad is not None]

    def predict_rows(self, part: tasks.Data) -> tuple[float, Any]:
        """Of the test rows of a part: the mean loss of a scored token, and what is predicted, `[n, T]`."""
        inputs, targets = (torch.from_numpy(x).to(self.args.device) for x in (part.test.inputs, part.test.targets))
        losses, found = [], []
        self.net.eval()
        with torch.no_grad(), torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.cell.protocol.bf16):
            for x, y in zip(
                *(rows.split(max(1, TOKENS // inputs.shape[1])) for rows in (inputs, targets)), strict=True
            ):
                logits = self.net(x)
                losses.append(loss_of(logits, y) * (y != IGNORE).sum())
                found.append(logits.argmax(-1))
        self.net.train()
        scored = max(1, int((part.test.targets != IGNORE).sum()))
        return float(torch.stack(losses).sum()) / scored, torch.cat(found).cpu().numpy()


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


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def learn(
    cell: Cell, drawn: Drawn, model: nn.Module, device: torch.device, tell: Tell, checkpoints: Path | None = None
) -> Judge:
    """Train `model` as `cell` says, from the last checkpoint in `checkpoints` if there is one.

    Args:
        cell: what to do.
        drawn: its rows.
        model: freshly initialised, on `device`.
        device: to train on.
        tell: told of each epoch.
        checkpoints: where a run that takes minutes saves itself; nowhere that lasts if absent.

    Returns:
        The judge, with curves and scores.

    Raises:
        NonFiniteError: the loss diverged.
    """
    judge = Judge(cell, drawn, tell)
    with _folder(checkpoints) as folder:
        trainer = CellTrainer(cell, drawn, model, judge, arguments(cell, folder, device))
        judge.trainer = trainer
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)
    return judge


def arguments(cell: Cell, folder: Path, device: torch.device) -> TrainingArguments:
    """What the Trainer is told."""
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=cell.protocol.epochs,
        max_grad_norm=cell.protocol.clip or float("inf"),
        use_cpu=device.type == "cpu",
        seed=cell.seed,
        save_strategy="no",
        save_total_limit=1,
        eval_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
