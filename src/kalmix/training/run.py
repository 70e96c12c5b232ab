"""Running a recipe: corpus, tokenizer, model, Trainer, and everything that a run leaves behind.

output/recipe.json      what was asked for          output/model/        the model, for AutoModelForCausalLM
output/checkpoints/     to resume from, until done  output/tensorboard/  the curves, live
output/history.json     the curves, as numbers
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)

from kalmix.errors import ArgumentError
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.text import Corpus, load, train_tokenizer
from kalmix.training.checkpoints import newest
from kalmix.training.data import Blocks, mark, pretrained, stream
from kalmix.training.recipe import Recipe
from kalmix.training.schedule import Schedule, interruptible
from kalmix.training.trainer import FilterTrainer, arguments, processes, tensorboard

LOOK = 8192  # tokens of held-out text a look during training reads, at most
HISTORY = "history.json"


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
    model: KalmixForCausalLM
    tokenizer: PreTrainedTokenizerFast
    finished: bool
    steps: int
    seconds: float
    training: list[tuple[float, float]]
    held_out: list[tuple[float, float]]


def train(recipe: Recipe, output: Path, *, resume: bool = False, callbacks: Sequence[TrainerCallback] = ()) -> Run:
    """Train as `recipe` says, into `output`; with `resume`, go on from the newest sound checkpoint there.

    Runs under `torchrun` as it is (the first process says where `output` is). Ctrl-C and SIGTERM save a checkpoint and
    return with `finished` false.

    Raises:
        ArgumentError: the text, a mixer or a size will not do; the loss is no longer finite; `output` holds a run
            already (without `resume`), or a finished one (with it).
    """
    here = processes()
    output = Path(broadcast_object_list([str(output)])[0])
    if not resume and ((output / HISTORY).exists() or newest(output / "checkpoints")):
        raise ArgumentError(
            "output", got=f"{str(output)!r}, which holds a run", needs="a new folder, or that run resumed"
        )
    if resume and _finished(output):
        raise ArgumentError("output", got=f"{str(output)!r}, a finished run", needs="an unfinished one, to resume it")
    set_seed(recipe.seed)
    corpus = load(recipe.text)
    with here.main_process_first():
        fresh = here.is_main_process and not resume
        tokenizer = _tokenizer(recipe, corpus, output / "model", fresh=fresh)
    end = mark(tokenizer)
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
        args=arguments(recipe, output, batch=min(recipe.batch, max(1, len(data) // here.num_processes))),
        train_dataset=data,
        eval_dataset=_look(unseen, recipe),
        callbacks=[schedule, *tensorboard(output, here.is_main_process), *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = newest(output / "checkpoints") if resume else None
    try:
        with interruptible(schedule):
            result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except BackendCompilerFailed as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError("compile", got=f"asked for where it fails ({reason})", needs="left out") from error
    return _ended(trainer, output, corpus, tokenizer, seconds=result.metrics["train_runtime"])


def build(recipe: Recipe, vocabulary: int, end: int) -> KalmixForCausalLM:
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


def _tokenizer(recipe: Recipe, corpus: Corpus, folder: Path, *, fresh: bool) -> PreTrainedTokenizerFast:
    """A new tokenizer, saved to `folder`; or the one there, so that a resumed run or another process has the same."""
    if not fresh and (folder / "tokenizer.json").exists():
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


def _finished(output: Path) -> bool:
    """Whether the run in `output` came to its end."""
    try:
        history = json.loads((output / HISTORY).read_text(encoding="utf-8"))
        return history[-1]["progress"] >= 1
    except (OSError, ValueError, LookupError):  # it was cut off before it could write a whole history
        return False


def _ended(trainer: FilterTrainer, output: Path, corpus: Corpus, tokenizer: Any, *, seconds: float) -> Run:
    """Write what a run leaves behind, and gather it."""
    history, finished = trainer.state.log_history, trainer.schedule.finished
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if trainer.is_world_process_zero():
        model.save_pretrained(output / "model")
        (output / HISTORY).write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
        if finished:
            shutil.rmtree(output / "checkpoints", ignore_errors=True)  # the model is all that is wanted now
    return Run(
        recipe=trainer.recipe,
        output=output,
        corpus=corpus,
        model=model,
        tokenizer=tokenizer,
        finished=finished,
        steps=trainer.state.global_step,
        seconds=seconds,
        training=[(row["tokens"], row["bits_per_byte"]) for row in history if "bits_per_byte" in row],
        held_out=[(row["tokens"], row["eval_bits_per_byte"]) for row in history if "eval_bits_per_byte" in row],
    )
