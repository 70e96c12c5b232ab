"""Loading of models, runs and checkpoints that `kalmix train` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kalmix.errors import ArgumentError
from kalmix.files import read_json
from kalmix.training.checkpoints import (
    STATE_FILE,
    check_intact,
    checkpoint_step,
    find_checkpoint,
    is_checkpoint,
    run_of,
)
from kalmix.training.corpus import vocabulary_size
from kalmix.training.model_folder import find_intact_model, find_model, unfinished_run
from kalmix.training.recipe import Recipe
from kalmix.validation import check_choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from kalmix.models import KalmixForCausalLM
    from kalmix.training.run import Run

EVALUATION = "evaluation"  # folder in a run, or in a model's folder


def load(folder: Path, predict: str | None = None) -> tuple[KalmixForCausalLM, PreTrainedTokenizerFast]:
    """Load the model and tokenizer of a run, a checkpoint or a model's folder, without running code from it.

    Only tokenizer.json is read of the tokenizer. generation_config.json is ignored: generation follows the options of
    the command line.

    Args:
        folder: folder of a run or of a model, or a checkpoint, as in `find_model`.
        predict: replaces `KalmixConfig.predict`.

    Raises:
        ArgumentError: as `find_intact_model`; the folder holds no kalmix model or is damaged; `predict` is unknown, or
            is "marginal" and the last layer has no posterior.
    """
    model = load_model(folder, predict)
    from kalmix.training.data import read_tokenizer

    tokenizer = read_tokenizer(find_model(folder).tokenizer, model.config.bos_token_id)
    check_vocabulary(tokenizer, model, folder)
    return model, tokenizer


def load_model(folder: Path, predict: str | None = None) -> KalmixForCausalLM:
    """Load the model of a run, a checkpoint or a model's folder; see `load`."""
    weights = find_intact_model(folder).weights
    from transformers import GenerationConfig
    from transformers.utils import logging

    from kalmix.models import KalmixForCausalLM

    logging.disable_progress_bar()
    model = KalmixForCausalLM.from_pretrained(weights)
    if is_checkpoint(folder):
        model.config.max_packed_sequences = None  # depends on the data
    set_predictions(model, predict)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model.eval()


def move(model: KalmixForCausalLM, device: str | None) -> None:
    """Move a model to a device, by default to an accelerator if there is one.

    Raises:
        ArgumentError: there is no such device.
    """
    import torch

    chosen = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        torch.nn.Module.to(model, torch.device(chosen))
    except (RuntimeError, AssertionError) as error:  # unknown name, or no such GPU
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ArgumentError("device", got=repr(device), expected="a device of this machine, such as cuda") from None


def evaluation_folder(folder: Path) -> Path:
    """Return the folder for scores of a run or a model: its subfolder `evaluation`; for a checkpoint, one in there."""
    return run_of(folder) / EVALUATION / folder.name if is_checkpoint(folder) else folder / EVALUATION


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, model: KalmixForCausalLM, folder: Path) -> None:
    """Check that the model has all tokens of a tokenizer.

    Raises:
        ArgumentError: it has not.
    """
    if (size := vocabulary_size(tokenizer.get_vocab())) > model.config.vocab_size:
        got = f"{str(folder)!r}, whose tokenizer has a token {size - 1}"
        raise ArgumentError("model", got=got, expected=f"token ids below {model.config.vocab_size}")


def set_predictions(model: KalmixForCausalLM, predict: str | None) -> None:
    """Set `predict` of a model's configuration, unless it is `None`.

    Raises:
        ArgumentError: it is unknown, or is "marginal" and the last layer has no posterior.
    """
    if predict is None:
        return
    from kalmix.models.configuration import PREDICTIONS

    check_choice("predict", predict, PREDICTIONS)
    last = model.model.layers.last_block.mixer
    if predict == "marginal" and not last.has_posterior:
        problem = f"is 'marginal', but the last layer, {type(last).__name__}, has no posterior"
        raise ArgumentError("predict", problem=problem, expected="'mean'")
    model.config.predict = predict


def load_run(folder: Path) -> Run:
    """Load a finished run: recipe, history, text, tokenizer and model, the latter on an accelerator if there is one.

    Args:
        folder: folder of the run; or a checkpoint, as in `find_model`, for the run up to it. The `output` of that run
            is the folder for scores of the checkpoint.

    Raises:
        ArgumentError: there is no finished run or no intact checkpoint, its model is damaged, or its text or tokenizer
            is missing or changed.
    """
    from kalmix.training import corpus as text
    from kalmix.training import inputs
    from kalmix.training.run import Run, finished, read_history

    run = run_of(folder) if is_checkpoint(folder) else folder
    output = folder if run == folder else evaluation_folder(folder)
    recipe = Recipe.load(run)
    if recipe.shards is not None:
        got = f"{str(folder)!r}, which was trained on token shards"
        raise ArgumentError("run", got=got, expected="a run on a text")
    if run != folder:
        history = _history_until(find_checkpoint(folder, "run"))
    elif not finished(history := read_history(folder)):
        done = f"at {history[-1].get('progress', 0.0):.0%} of its training" if history else "before it saved anything"
        raise unfinished_run("run", f"{str(folder)!r} stopped {done}", folder)
    model, tokenizer = load(folder)
    corpus, before = text.load_corpus(recipe.text), inputs.load(run)
    if before is not None:
        when = f"when {str(run)!r} was trained"
        inputs.check(inputs.digests(corpus, run), before, when, "to evaluate the run")
    move(model, None)
    return Run(recipe, output, corpus, model, tokenizer, history)


def _history_until(checkpoint: Path) -> list[dict[str, float]]:
    """Return the log of a run up to a checkpoint. Its last row has the step of the checkpoint and its tokens."""
    check_intact(checkpoint, "run")
    rows, step = read_json(checkpoint / STATE_FILE)["log_history"], checkpoint_step(checkpoint)
    return [*rows, {"step": step, "tokens": rows[-1]["tokens"] // rows[-1]["step"] * step}]
