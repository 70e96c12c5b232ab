"""Running a recipe: corpus, tokenizer, model, Trainer, and everything that a run leaves behind.

    output/recipe.json      what was asked for          output/model/        the model, for AutoModelForCausalLM
    output/checkpoints/     what a resumed run needs    output/tensorboard/  the curves, live
    output/history.json     the curves, as numbers
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from kalmix.errors import ArgumentError
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.text import END, Corpus, load, train_tokenizer
from kalmix.training.checkpoints import newest
from kalmix.training.data import Blocks, pretrained, stream
from kalmix.training.optimizer import parameter_groups
from kalmix.training.recipe import FILE, Recipe
from kalmix.training.schedule import Schedule, interruptible

LOOK = 16384  # tokens of held-out text a look during training reads, at most
FOREVER = 10**9  # steps of a run that only the clock ends


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        finished: false if it was interrupted; resuming goes on from where it stopped.
        steps: taken, in all its sessions together.
        seconds: of training, in this session.
        training: `(tokens seen, bits per byte)` of training batches.
        held_out: the same of a part of the held-out text.
    """

    recipe: Recipe
    output: Path
    corpus: Corpus
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    finished: bool
    steps: int
    seconds: float
    training: list[tuple[float, float]]
    held_out: list[tuple[float, float]]


class FilterTrainer(Trainer):
    """The Hugging Face Trainer with our parameter groups, our schedule, and logs that say more.

    Each row of the log carries `progress` (0 to 1) and `tokens` seen; a loss is followed by its `bits_per_byte`.
    """

    def __init__(self, recipe: Recipe, schedule: Schedule, density: dict[str, float], **options: Any) -> None:
        """Args:
        recipe: of the run.
        schedule: also among the callbacks.
        density: tokens a byte of what a loss is of: "loss" of training, "eval_loss" of held-out text.
        options: of `Trainer`.
        """
        self.recipe, self.schedule, self.density = recipe, schedule, density
        super().__init__(**options)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = parameter_groups(self.model, rate=self.recipe.rate, decay=self.recipe.decay)
            self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=True)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.schedule.factor)
        return self.lr_scheduler

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        bits = {
            name.replace("loss", "bits_per_byte"): logs[name] * density / math.log(2)
            for name, density in self.density.items()
            if name in logs
        }
        tokens = self.state.global_step * self.recipe.block * self.recipe.accumulate
        tokens *= self.args.per_device_train_batch_size * self.args.world_size
        super().log({**logs, **bits, "tokens": tokens, "progress": self.schedule.progress}, *args, **options)


def train(recipe: Recipe, output: Path, *, resume: bool = False, callbacks: Sequence[TrainerCallback] = ()) -> Run:
    """Train as `recipe` says, into `output`; with `resume`, go on from the newest sound checkpoint there.

    Runs under `torchrun` as it is. Ctrl-C and SIGTERM save a checkpoint and return with `finished` false.

    Raises:
        ArgumentError: the text, a mixer or a size will not do; or `output` already holds a run (without `resume`).
    """
    if not resume and (output / FILE).exists():
        raise ArgumentError("output", got=f"{str(output)!r}, which holds a run already", needs="a new folder (or resume that run)")
    set_seed(recipe.seed)
    corpus = load(recipe.text)
    here = PartialState()
    with here.main_process_first():
        tokenizer = _tokenizer(recipe, corpus, output / "model")
    end = tokenizer.convert_tokens_to_ids(END)
    model = build(recipe, len(tokenizer), end)
    seen, unseen = stream(tokenizer, corpus.training), stream(tokenizer, corpus.held_out)
    data = Blocks(seen, recipe.block, end=end, documents=recipe.documents)
    schedule = Schedule(steps=recipe.steps, minutes=recipe.minutes, warmup=recipe.warmup, cooldown=recipe.cooldown)
    if here.is_main_process:
        recipe.save(output)
    trainer = FilterTrainer(
        recipe,
        schedule,
        {"loss": len(seen) / _bytes(corpus.training), "eval_loss": len(unseen) / _bytes(corpus.held_out)},
        model=model,
        args=_arguments(recipe, output, batch=min(recipe.batch, max(1, len(data) // here.num_processes))),
        train_dataset=data,
        eval_dataset=_look(unseen, recipe),
        callbacks=[schedule, *_tensorboard(output, here.is_main_process), *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = newest(output / "checkpoints") if resume else None
    with interruptible(schedule):
        result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return _ended(trainer, output, corpus, tokenizer, seconds=result.metrics["train_runtime"])


def build(recipe: Recipe, vocabulary: int, end: int) -> PreTrainedModel:
    """The model of a recipe, freshly initialised.

    Raises:
        ArgumentError: an unknown mixer, or a size that does not fit.
    """
    config = KalmixConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.width,
        layers=list(recipe.layers),
        loss=recipe.loss,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    return KalmixForCausalLM(config)


def _tokenizer(recipe: Recipe, corpus: Corpus, folder: Path) -> PreTrainedTokenizerFast:
    """The run's tokenizer: the one it saved, so that a resumed run or another process has the same; else a new one."""
    if (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    tokenizer = pretrained(train_tokenizer(corpus.training, recipe.tokens, vocabulary=recipe.vocabulary))
    tokenizer.save_pretrained(folder)
    return tokenizer


def _look(ids: Tensor, recipe: Recipe) -> Dataset | None:
    """What is looked at during training: the first blocks of the held-out text, in full batches if it has one."""
    ids = ids[:LOOK]
    whole = len(ids) // (recipe.block * recipe.batch) * recipe.block * recipe.batch  # another size would compile anew
    return Blocks(ids[: whole or None], recipe.block, end=-1) if len(ids) >= recipe.block else None


def _bytes(documents: Sequence[str]) -> int:
    return len("\n\n".join(documents).encode())


def _arguments(recipe: Recipe, output: Path, *, batch: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(output / "checkpoints"),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=recipe.batch,
        gradient_accumulation_steps=recipe.accumulate,
        max_steps=FOREVER if recipe.steps is None else recipe.steps,
        max_grad_norm=1.0,
        bf16=recipe.bf16,
        torch_compile=recipe.compile,
        seed=recipe.seed,
        logging_steps=10 if torch.cuda.is_available() else 1,  # reading a loss waits for the GPU
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="no",
        save_total_limit=2,
        eval_strategy="no",
        prediction_loss_only=True,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def _tensorboard(output: Path, main: bool) -> list[TrainerCallback]:
    if not main:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(output / "tensorboard")))]


def _ended(trainer: FilterTrainer, output: Path, corpus: Corpus, tokenizer: Any, *, seconds: float) -> Run:
    """Write what a run leaves behind, and gather it."""
    trainer.save_model(str(output / "model"))
    history = trainer.state.log_history
    if trainer.is_world_process_zero():
        (output / "history.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    return Run(
        recipe=trainer.recipe,
        output=output,
        corpus=corpus,
        model=trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False),
        tokenizer=tokenizer,
        finished=trainer.schedule.finished,
        steps=trainer.state.global_step,
        seconds=seconds,
        training=[(row["tokens"], row["bits_per_byte"]) for row in history if "bits_per_byte" in row],
        held_out=[(row["tokens"], row["eval_bits_per_byte"]) for row in history if "eval_bits_per_byte" in row],
    )
