"""Training runs: from a recipe to a trained model in a folder.

Files of a run:

- `recipe.json`: settings.
- `model/`: model and tokenizer, for `AutoModelForCausalLM` and `AutoTokenizer`.
- `checkpoints/`: checkpoints to resume from, deleted at the end, and those of `Recipe.keep_steps`. Each has the
  settings of the run, with which it is resumed.
- `history.json`: log of the Trainer.
- `tensorboard/`: the same, for TensorBoard.
- `inputs.json`: digests of text or shards, and of the tokenizer.
- `branch.json`: for a branch, the run and step that it came from.

`kalmix report` adds `result.json` and figures to a finished run (`kalmix.training.evaluation`).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._dynamo.exc import BackendCompilerFailed

from kalmix._extras import optional_imports

with optional_imports():
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list
    from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback, set_seed
    from transformers.integrations import get_available_reporting_integrations

from kalmix.errors import ArgumentError, FileError, any_of
from kalmix.files import disk_errors, lock_folder, read_json, sync_tree, write_text
from kalmix.models import KalmixForCausalLM
from kalmix.training import inputs
from kalmix.training.branch import BRANCH_FILE, begin_branch, check_has_begun, find_start
from kalmix.training.checkpoints import (
    CHECKPOINTS,
    check_step_size,
    list_checkpoints,
    newest_checkpoint,
    remove_checkpoints,
    run_of,
)
from kalmix.training.corpus import Corpus, is_hidden
from kalmix.training.initial_model import build, load_weights
from kalmix.training.peers import peer_errors, peer_has_ended, watched_peers
from kalmix.training.recipe import BRANCHED, CHANGEABLE, HISTORY, RECIPE_FILE, Recipe, resume_command
from kalmix.training.run_data import RunData, ShardSource, TextSource, open_source
from kalmix.training.same_run import check_same_data, check_same_recipe, with_saved_order
from kalmix.training.schedule import Curve, SaveRule, Schedule, interruptible
from kalmix.training.trainer import KalmixTrainer, check_fsdp, process_state, tensorboard_callbacks, training_arguments
from kalmix.validation import check_bool

UNLISTED = ("all", "none", "flyte", "azure_ml")  # names in `report_to` that transformers accepts; it need not list them


@dataclass(frozen=True)
class Run:
    """Training run that has ended, finished or interrupted.

    Attributes:
        recipe: settings.
        output: folder of the run.
        corpus: text, split; empty for a run on shards.
        model: trained model.
        tokenizer: its tokenizer.
        history: log of the Trainer over all sessions, one mapping per row.
        interrupted: a signal ended this session.
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
        """Whether training reached its end; otherwise resuming continues it."""
        return finished(self.history)

    @property
    def steps(self) -> int:
        """Number of training steps over all sessions."""
        return int(self.history[-1]["step"])

    @property
    def seconds(self) -> float:
        """Seconds of training in the last session."""
        return self.history[-1]["train_runtime"]

    @property
    def training(self) -> list[tuple[float, float]]:
        """Pairs of tokens seen and bits per byte of training batches."""
        return self._curve("bits_per_byte")

    @property
    def held_out(self) -> list[tuple[float, float]]:
        """Pairs of tokens seen and bits per byte of the first held-out tokens."""
        return self._curve("eval_bits_per_byte")

    def _curve(self, name: str) -> list[tuple[float, float]]:
        return [(row["tokens"], row[name]) for row in self.history if name in row]


def train(
    recipe: Recipe,
    output: str | os.PathLike[str],
    *,
    resume: bool = False,
    branch_from: str | os.PathLike[str] | None = None,
    callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
) -> Run:
    """Train a language model by a recipe, on an accelerator if there is one.

    A checkpoint is saved when a fifth, two, three and four fifths of the run are done, at least every
    `recipe.save_minutes` minutes, and every `recipe.save_steps` and `recipe.keep_steps` steps.
    Ctrl-C and SIGTERM save a checkpoint and return a `Run` whose `finished` is False. Under `torchrun`, all processes
    train one model: pass equal arguments to all. If their `output` differs, that of the first process counts.

    Args:
        recipe: settings. To resume a run, pass its settings, `Recipe.load(output)`; those in
            `kalmix.training.recipe.CHANGEABLE` may differ, and recipe.json is then rewritten. Checkpoints store the
            settings, so that a recipe.json that was edited is refused.
        output: folder of the run, a path or a string; created if missing. It may contain other files, but no run. It
            must not be inside a folder `recipe.text`: the run's own files would change the text. The run writes
            `recipe.json`, `inputs.json`, `history.json`, `model/` (model and tokenizer), `tensorboard/` and, until it
            is finished, `checkpoints/`.
        resume: continue the run in `output` from its newest intact checkpoint. Unfinished checkpoints, and those with
            damaged files, are skipped with a warning. A run that was stopped before its first checkpoint, or no run,
            starts from the beginning.
        branch_from: begin at a checkpoint of another run, with its optimizer, random state and position in the data:
            RUN/checkpoint-N, or RUN for its newest intact checkpoint. `recipe` has the settings of that run, except for
            those in `kalmix.training.recipe.BRANCHED` and `CHANGEABLE`. Neither the run nor the branch may be in its
            cooldown at that step. The warmup keeps its number of steps. The branch equals a run with the recipe that is
            written to `output`, and does not need the other run once it has begun. Other `recipe.shards`, or other
            weights, begin at the start of their data; their tokenizer must be the same.
        callbacks: further callbacks of the Hugging Face Trainer, objects or classes.

    Returns:
        `Run` with the trained model, its tokenizer, the text and the history of losses.

    Raises:
        ArgumentError: an argument has another type; an integration in `recipe.report_to` is unknown or not installed;
            the text or the shards cannot be read or are too short; a layer, a size or the number of processes is not
            accepted; weights of `recipe.initial` do not fit; `torch.compile` fails; training diverges (the loss is no
            longer finite); `output` is a file, is inside the text, or holds a run (without `resume`) or a finished one
            (with it); another process trains into `output`. With `resume`: the data, the tokenizer, a setting or,
            without `recipe.batch_tokens`, the number of processes is not that of the checkpoint; a checkpoint lacks a
            file, or none of them is intact. With `branch_from`: there is no such checkpoint, or the branch cannot begin
            there.
        OSError: a file cannot be written, for example on a full disk; names the path. `ConnectionError`: another
            process of the run has ended.

    Example:
        >>> from pathlib import Path
        >>> from kalmix.training import Recipe
        >>> from kalmix.training.run import train
        >>> Path("corpus").mkdir()
        >>> for n in range(20):
        ...     _ = Path(f"corpus/{n}.txt").write_text(f"Document {n}: " + "a filter is a recurrence. " * 9)
        >>> sizes = {"vocab_size": 260, "hidden_size": 8, "seq_len": 16, "batch_size": 2}
        >>> run = train(Recipe(text="corpus", layers=("kla",), steps=2, **sizes), Path("run"))
        >>> run.finished, run.steps
        (True, 2)
    """
    _check_arguments(recipe, output, resume=resume, branch_from=branch_from, callbacks=callbacks)
    state = process_state()
    check_fsdp(recipe)
    output = Path(broadcast_object_list([str(output)])[0])
    if output.exists() and not output.is_dir():
        raise ArgumentError("output", got=f"{str(output)!r}, which is a file", expected="a folder")
    _check_outside_text(recipe, output)
    set_seed(recipe.seed)
    if resume or branch_from is not None:
        recipe = with_saved_order(recipe, output if branch_from is None else run_of(Path(branch_from)))
    source = open_source(recipe)
    with (
        lock_folder(output) if state.is_main_process else nullcontext(),
        disk_errors(output),
        peer_errors(ConnectionError(peer_has_ended(resume_command(recipe, output)))),
    ):
        if branch_from is not None:
            recipe, resume = _branch(recipe, output, Path(branch_from), source), True
        return _train(recipe, output, source, resume=resume, callbacks=callbacks)


def _check_arguments(recipe: object, output: object, *, resume: bool, branch_from: object, callbacks: object) -> None:
    """Check the arguments of `train` that need no data."""
    if not isinstance(recipe, Recipe):
        raise ArgumentError("recipe", got=f"a {type(recipe).__name__}", expected="a Recipe")
    if not isinstance(output, str | os.PathLike):
        raise ArgumentError("output", got=repr(output), expected="the path of a folder")
    check_bool("resume", resume)
    if branch_from is not None and (resume or not isinstance(branch_from, str | os.PathLike)):
        got = f"{str(branch_from)!r}, with resume=True" if resume else repr(branch_from)
        raise ArgumentError("branch_from", got=got, expected="the path of a run or checkpoint, without `resume`")
    entries = callbacks if isinstance(callbacks, list | tuple) else [None]
    if not all(issubclass(x if isinstance(x, type) else type(x), TrainerCallback) for x in entries):
        raise ArgumentError("callbacks", got=repr(callbacks), expected="a list of callbacks of the Trainer")
    installed = get_available_reporting_integrations()
    for name in recipe.report_to:
        if name not in (*installed, *UNLISTED):
            got = f"{name!r}, which is unknown to transformers or not installed"
            raise ArgumentError("report_to", got=got, expected=any_of(["all", *installed]))


def _check_outside_text(recipe: Recipe, output: Path) -> None:
    """Check that the files of a run do not become part of its text. Hidden folders are not read as text."""
    if recipe.text is None or not output.resolve().is_relative_to(text := Path(recipe.text).resolve()):
        return
    if not any(map(is_hidden, output.resolve().relative_to(text).parts)):
        got = f"{str(output)!r}, which is inside the text {recipe.text!r}"
        hint = "The files of the run would change the text"
        raise ArgumentError("output", got=got, expected="a folder outside it (`--output`)", hint=hint)


def _branch(recipe: Recipe, output: Path, start: Path, source: TextSource | ShardSource) -> Recipe:
    """Begin a branch in the main process, and return its recipe in all. If it cannot begin, the others end quietly."""
    state = process_state()
    quiet = nullcontext() if state.is_main_process else peer_errors(SystemExit(1))  # the main process prints its error
    with quiet, state.main_process_first():
        if state.is_main_process:
            checkpoint = find_start(start)
            check_same_recipe(recipe, checkpoint, "branch from", (*CHANGEABLE, *BRANCHED))
            _check_new(output)
            if isinstance(source, ShardSource):
                source.check_rows()
            begin_branch(recipe, checkpoint, output, source.digests(run_of(start)), state.num_processes)
    return Recipe.load(output)


def _train(
    recipe: Recipe, output: Path, source: TextSource | ShardSource, *, resume: bool, callbacks: Sequence[Any]
) -> Run:
    """Train into a folder that this process has locked."""
    state = process_state()
    checkpoint = _checkpoint(recipe, output, state, resume=resume)
    if checkpoint is not None:
        check_same_recipe(recipe, checkpoint, "resume")
        check_same_data(recipe, source.digests(output), checkpoint)
    with state.main_process_first():
        fresh = state.is_main_process and checkpoint is None
        tokenizer = source.tokenizer(output / "model", fresh=fresh)
    model = build(recipe, *source.vocabulary(tokenizer))
    if recipe.initial is not None and checkpoint is None:
        load_weights(model, recipe.initial, tokenizer.get_vocab())
    if recipe.checkpointing:
        old_name = "gradient_checkpointing_enable"  # the only name in older transformers, deprecated since
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old_name)
        enable({"use_reentrant": False})
    data = source.load(tokenizer, state.num_processes, state.process_index)
    if checkpoint is not None:
        sequences = data.batching.rows * data.batching.accumulation * state.num_processes
        check_step_size(checkpoint, state.num_processes, sequences)
    _warn_of_no_evaluation(recipe, data, state)
    model.config.max_packed_sequences = data.max_documents
    curve = Curve(recipe.schedule, recipe.warmup, recipe.cooldown, recipe.final_learning_rate)
    saves = SaveRule(60 * recipe.save_minutes, recipe.save_steps, recipe.keep_steps)
    schedule = Schedule(steps=data.batching.steps, minutes=recipe.minutes, curve=curve, saves=saves)
    read = source.digests(output)
    if state.is_main_process:
        recipe.save(output)
        inputs.save(output, read)
    trainer = KalmixTrainer(
        recipe,
        schedule,
        data,
        read,
        model=model,
        args=training_arguments(recipe, output, data),
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        callbacks=[schedule, *data.callbacks, *tensorboard_callbacks(output, state.is_main_process), *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    try:
        with watched_peers(resume_command(recipe, output)), interruptible(schedule):  # saving is not interrupted either
            trainer.train_from(checkpoint)
            return _save_model(trainer, output, source.corpus, tokenizer)
    except BackendCompilerFailed as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(
            "compile", problem=f"fails on this machine ({reason})", expected="a run without it"
        ) from error


def _warn_of_no_evaluation(recipe: Recipe, data: RunData, state: PartialState) -> None:
    """Warn in the main process if there is held-out text, but too little of it for evaluations during training."""
    if data.evaluation is not None or not recipe.eval_tokens or "eval_loss" not in data.tokens_per_byte:
        return
    enough = recipe.eval_tokens >= recipe.seq_len
    problem = "the data hold out fewer" if enough else f"`eval_tokens` is {recipe.eval_tokens:,}"
    if state.is_main_process:
        warnings.warn(
            f"the run is not evaluated on held-out text: a sequence has {recipe.seq_len:,} tokens, and {problem}. "
            "`eval_tokens=0` turns evaluation off",
            stacklevel=2,
        )


def _check_new(output: Path) -> None:
    """Check that a folder holds no run."""
    if (output / HISTORY).exists() or list_checkpoints(output / CHECKPOINTS):
        raise ArgumentError(
            "output", got=f"{str(output)!r}, which holds a run", expected="a new folder, or resume=True (`--resume`)"
        )


def _checkpoint(recipe: Recipe, output: Path, state: PartialState, *, resume: bool) -> Path | None:
    """Return the checkpoint to resume from; `None` to start from the beginning.

    Warns if an earlier start is lost.

    Raises:
        ArgumentError: as `train`.
    """
    checkpoints = output / CHECKPOINTS
    if not resume:
        _check_new(output)
        (output / BRANCH_FILE).unlink(missing_ok=True)  # of a branch that was killed before it began
    elif finished(read_history(output)):
        remove_checkpoints(checkpoints, Recipe.load(output).keep_steps)  # a killed process may have left them
        hint = f"Its model is in {output / 'model'}"
        got = f"{str(output)!r}, which holds a finished run"
        raise ArgumentError("output", got=got, expected="an unfinished run to resume", hint=hint)
    checkpoint = newest_checkpoint(checkpoints)
    if checkpoint is None and resume:
        check_has_begun(output)
        if list_checkpoints(checkpoints) or (output / HISTORY).exists():
            got, hint = (
                f"{str(output)!r}, which holds no intact checkpoint",
                "To start from the beginning, choose another folder",
            )
            raise ArgumentError("output", got=got, expected="a run that can be resumed", hint=hint)
    if checkpoint is None and (output / RECIPE_FILE).exists() and state.is_main_process:
        warnings.warn(
            f"the run in {output} was stopped before its first checkpoint, so it starts from the beginning. After its "
            f"next checkpoint, `{resume_command(recipe, output)}` continues from there",
            stacklevel=2,
        )
    return checkpoint


def read_history(output: Path) -> list[dict[str, float]]:
    """Return the log of the run in `output`; empty if it has none that can be read."""
    try:
        return [row for row in read_json(output / HISTORY, list) if isinstance(row, dict)]
    except FileError:  # interrupted before it wrote one
        return []


def finished(history: Sequence[dict[str, float]]) -> bool:
    """Return whether a run with this log reached its end."""
    return bool(history) and history[-1].get("progress", 0.0) >= 1


def _save_model(trainer: KalmixTrainer, output: Path, corpus: Corpus, tokenizer: Any) -> Run:
    """Save the model and the history of a run, and return the run.

    The history is written last, so that a run whose history is finished has a complete model.
    """
    history = trainer.state.log_history
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    model.config.max_packed_sequences = None  # depends on the data
    whole = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_fsdp_enabled else None
    if trainer.is_world_process_zero():
        model.save_pretrained(output / "model", state_dict=whole)
        sync_tree(output / "model")
        write_text(output / HISTORY, json.dumps(history, indent=1) + "\n")
        if finished(history):
            remove_checkpoints(output / CHECKPOINTS, trainer.recipe.keep_steps)
    if trainer.recipe.fsdp:
        trainer.accelerator.wait_for_everyone()
        model = KalmixForCausalLM.from_pretrained(output / "model")  # a caller may use it in one process
    return Run(
        recipe=trainer.recipe,
        output=output,
        corpus=corpus,
        model=model,
        tokenizer=tokenizer,
        history=history,
        interrupted=trainer.schedule.signalled or trainer.schedule.interrupted,
    )
