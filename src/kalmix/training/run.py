"""Running a recipe: corpus, tokenizer, model, Trainer, and everything that a run leaves behind.

output/recipe.json      what was asked for          output/model/        the model, for AutoModelForCausalLM
output/checkpoints/     to resume from, until done  output/tensorboard/  the curves, live
output/history.json     the curves, as numbers      output/inputs.json   digests of text and tokenizer

`kalmix report` adds result.json and figures to a finished run (`kalmix.training.evaluation`).
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.data import Dataset

from kalmix._extras import optional_imports

with optional_imports():
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list
    from transformers import (
        PreTrainedTokenizerFast,
        PrinterCallback,
        TrainerCallback,
        set_seed,
    )

from kalmix.errors import ArgumentError, FileError
from kalmix.files import disk_errors, lock_folder, read_json, sync_tree, write_text
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.training import inputs
from kalmix.training.checkpoints import list_checkpoints, newest_checkpoint, read_input_digests
from kalmix.training.corpus import Corpus, load_corpus, train_tokenizer
from kalmix.training.data import SequenceDataset, encode_documents, end_of_text_id, read_tokenizer, wrap_tokenizer
from kalmix.training.recipe import RECIPE_FILE, Recipe
from kalmix.training.schedule import Schedule, interruptible
from kalmix.training.trainer import KalmixTrainer, process_state, tensorboard_callbacks, training_arguments

EVAL_TOKENS = 8192  # tokens of held-out text a look during training reads, at most
HISTORY = "history.json"


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        history: the Trainer's log, a row a logged step, of all sessions together.
        interrupted: whether a signal asked this session to stop.
    """

    recipe: Recipe
    output: Path
    corpus: Corpus
    model: KalmixForCausalLM
    tokenizer: PreTrainedTokenizerFast
    history: list[dict[str, float]]
    interrupted: bool = False

    @property
    def finished(self) -> bool:
        """Whether training reached its end; if not, resuming continues it."""
        return finished(self.history)

    @property
    def steps(self) -> int:
        """Training steps of all sessions."""
        return int(self.history[-1]["step"])

    @property
    def seconds(self) -> float:
        """Seconds of training in the last session."""
        return self.history[-1]["train_runtime"]

    @property
    def training(self) -> list[tuple[float, float]]:
        """`(tokens seen, bits per byte)` of training batches."""
        return self._curve("bits_per_byte")

    @property
    def held_out(self) -> list[tuple[float, float]]:
        """`(tokens seen, bits per byte)` of a part of the held-out text."""
        return self._curve("eval_bits_per_byte")

    def _curve(self, name: str) -> list[tuple[float, float]]:
        return [(row["tokens"], row[name]) for row in self.history if name in row]


def train(recipe: Recipe, output: Path, *, resume: bool = False, callbacks: Sequence[TrainerCallback] = ()) -> Run:
    """Train as `recipe` says, into `output`; with `resume`, go on from the newest intact checkpoint there.

    Runs under `torchrun` as it is (the first process says where `output` is). Ctrl-C and SIGTERM save a checkpoint and
    return with `finished` false. A checkpoint is saved every 10 minutes, and four times a run at least.

    Raises:
        ArgumentError: the text, a mixer or a size will not do; the loss is no longer finite; `output` holds a run
            already (without `resume`), or a finished one (with it); another process trains into it; the text, the
            tokenizer or a checkpoint are not what was saved.
        OSError: the disk is full; names the path.
    """
    state = process_state()
    output = Path(broadcast_object_list([str(output)])[0])
    set_seed(recipe.seed)
    corpus = load_corpus(recipe.text)
    with lock_folder(output) if state.is_main_process else nullcontext(), disk_errors(output):
        return _train(recipe, output, corpus, resume=resume, callbacks=callbacks)


def _train(recipe: Recipe, output: Path, corpus: Corpus, *, resume: bool, callbacks: Sequence[TrainerCallback]) -> Run:
    """Train into a folder that is this run's alone."""
    state = process_state()
    checkpoint = _checkpoint(output, state, resume=resume)
    if checkpoint is not None:
        when = f"when {str(checkpoint)!r} was saved"
        inputs.check(inputs.digests(corpus, output), read_input_digests(checkpoint), when, "to resume the run")
    with state.main_process_first():
        fresh = state.is_main_process and checkpoint is None
        tokenizer = _tokenizer(recipe, corpus, output / "model", fresh=fresh)
    end = end_of_text_id(tokenizer)
    model = build(recipe, len(tokenizer), end)
    train_ids, eval_ids = encode_documents(tokenizer, corpus.training), encode_documents(tokenizer, corpus.held_out)
    data = SequenceDataset(train_ids, recipe.seq_len, end_id=end, separate_documents=recipe.separate_documents)
    batch_size = min(recipe.batch_size, max(1, len(data) // state.num_processes))
    schedule = Schedule(steps=recipe.steps, minutes=recipe.minutes, warmup=recipe.warmup, cooldown=recipe.cooldown)
    read = inputs.digests(corpus, output)
    if state.is_main_process:
        recipe.save(output)
        inputs.save(output, read)
    trainer = KalmixTrainer(
        recipe,
        schedule,
        {"loss": len(train_ids) / _bytes(corpus.training), "eval_loss": len(eval_ids) / _bytes(corpus.held_out)},
        read,
        model=model,
        args=training_arguments(recipe, output, batch_size=batch_size),
        train_dataset=data,
        eval_dataset=_eval_dataset(eval_ids, recipe),
        callbacks=[schedule, *tensorboard_callbacks(output, state.is_main_process), *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    try:
        with interruptible(schedule):  # saving, too, is not cut off
            trainer.train_from(checkpoint)
            return _save_model(trainer, output, corpus, tokenizer)
    except BackendCompilerFailed as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError("compile", got=f"asked for where it fails ({reason})", expected="left out") from error


def build(recipe: Recipe, vocab_size: int, end: int) -> KalmixForCausalLM:
    """The model of a recipe, freshly initialised.

    Raises:
        ArgumentError: an unknown mixer, or a size that does not fit.
    """
    config = KalmixConfig(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        layers=list(recipe.layers),
        loss=recipe.loss,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    return KalmixForCausalLM(config)


def _checkpoint(output: Path, state: PartialState, *, resume: bool) -> Path | None:
    """Return the checkpoint to resume from, None to start from the beginning; warn if that loses a former start.

    Raises:
        ArgumentError: as `train` does.
    """
    checkpoints = output / "checkpoints"
    if not resume and ((output / HISTORY).exists() or list_checkpoints(checkpoints)):
        raise ArgumentError(
            "output", got=f"{str(output)!r}, which holds a run", expected="a new folder, or that run resumed"
        )
    if resume and finished(read_history(output)):
        shutil.rmtree(checkpoints, ignore_errors=True)  # a kill may have come before this
        expected = "an unfinished one, to resume it (`kalmix report` evaluates a finished one)"
        raise ArgumentError("output", got=f"{str(output)!r}, a finished run", expected=expected)
    checkpoint = newest_checkpoint(checkpoints, processes=state.num_processes)
    if checkpoint is None and (output / RECIPE_FILE).exists() and state.is_main_process:
        found = list_checkpoints(checkpoints)
        problem = "holds no intact checkpoint" if found else "was stopped before its first checkpoint"
        warnings.warn(
            f"the run in {output} {problem}: it starts again from the beginning; once it has saved a checkpoint, "
            f"`kalmix train --resume --output {output}` goes on from there",
            stacklevel=2,
        )
    return checkpoint


def _tokenizer(recipe: Recipe, corpus: Corpus, folder: Path, *, fresh: bool) -> PreTrainedTokenizerFast:
    """A new tokenizer, saved to `folder`; or the one there, so that a resumed run or another process has the same."""
    if not fresh and (folder / "tokenizer.json").exists():
        return read_tokenizer(folder)
    tokenizer = wrap_tokenizer(train_tokenizer(corpus.training, recipe.tokenizer, vocab_size=recipe.vocab_size))
    tokenizer.save_pretrained(folder)
    sync_tree(folder)
    return tokenizer


def _eval_dataset(ids: Tensor, recipe: Recipe) -> Dataset | None:
    """What is looked at during training: the first blocks of the held-out text, in full batches if it has one."""
    ids = ids[:EVAL_TOKENS]
    batch = recipe.seq_len * recipe.batch_size
    whole = len(ids) // batch * batch  # another size would compile anew
    return SequenceDataset(ids[: whole or None], recipe.seq_len, end_id=-1) if len(ids) >= recipe.seq_len else None


def _bytes(documents: Sequence[str]) -> int:
    return len("\n\n".join(documents).encode())


def read_history(output: Path) -> list[dict[str, float]]:
    """Return the log of the run in `output`; empty if there is none that can be read."""
    try:
        return [row for row in read_json(output / HISTORY, list) if isinstance(row, dict)]
    except FileError:  # it was cut off before it could write one
        return []


def finished(history: Sequence[dict[str, float]]) -> bool:
    """Whether a run with this log came to its end."""
    return bool(history) and history[-1].get("progress", 0.0) >= 1


def _save_model(trainer: KalmixTrainer, output: Path, corpus: Corpus, tokenizer: Any) -> Run:
    """Save the model and the history of a run that has ended, and return it.

    The history is written last: a run whose history says that it is finished has a whole model.
    """
    history = trainer.state.log_history
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if trainer.is_world_process_zero():
        model.save_pretrained(output / "model")
        sync_tree(output / "model")
        write_text(output / HISTORY, json.dumps(history, indent=1) + "\n")
        if finished(history):
            shutil.rmtree(output / "checkpoints", ignore_errors=True)  # the model is all that is wanted now
    return Run(
        recipe=trainer.recipe,
        output=output,
        corpus=corpus,
        model=model,
        tokenizer=tokenizer,
        history=history,
        interrupted=trainer.schedule.interrupted,
    )
