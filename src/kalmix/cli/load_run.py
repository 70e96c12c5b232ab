"""Loading of models and runs that `kalmix train` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kalmix.errors import ArgumentError
from kalmix.training.recipe import HISTORY, RECIPE_FILE, Recipe, resume_command
from kalmix.validation import check_choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from kalmix.models import KalmixForCausalLM
    from kalmix.training.run import Run

_EXPECTED = "a folder that `kalmix train` wrote (the run, or its model)"


def load(folder: Path, predict: str | None = None) -> tuple[KalmixForCausalLM, PreTrainedTokenizerFast]:
    """Load the model and tokenizer of a run's folder, or of its model folder, without running code from it.

    Only tokenizer.json is read of the tokenizer. generation_config.json is ignored: generation follows the options of
    the command line.

    Args:
        folder: folder of a run, or of a model.
        predict: replaces `KalmixConfig.predict`.

    Raises:
        ArgumentError: the folder is missing, holds no kalmix model, is damaged, or is a run without a model yet; or
            `predict` is unknown, or is "marginal" and the last layer has no posterior.
    """
    model = load_model(folder, predict)
    from kalmix.training.data import read_tokenizer

    tokenizer = read_tokenizer(model_folder(folder), model.config.bos_token_id)
    check_vocabulary(tokenizer, model, folder)
    return model, tokenizer


def load_model(folder: Path, predict: str | None = None) -> KalmixForCausalLM:
    """Load the model of a run's folder, or of its model folder; see `load`."""
    folder = model_folder(folder)
    from transformers import GenerationConfig
    from transformers.utils import logging

    from kalmix.models import KalmixForCausalLM

    logging.disable_progress_bar()
    model = KalmixForCausalLM.from_pretrained(folder)
    set_predictions(model, predict)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model.eval()


def model_folder(folder: Path) -> Path:
    """Return the folder with the model of a run: `folder` itself, or its subfolder `model`.

    Raises:
        ArgumentError: the folder is missing, or is a run that was stopped before it saved its model.
    """
    if not folder.is_dir():
        raise ArgumentError("model", problem=f"{str(folder)!r} does not exist", expected=_EXPECTED)
    found = folder / "model" if (folder / "model").is_dir() else folder
    run = folder if (folder / RECIPE_FILE).exists() else folder.parent
    is_run = (run / RECIPE_FILE).exists() and found in (run, run / "model")
    if is_run and not (run / HISTORY).exists() and not (found / "config.json").exists():
        got = f"{str(folder)!r}, a run that is not finished and has saved no model"
        hint = f"Continue it with: {resume_command(Recipe.load(run), run)}"
        raise ArgumentError("model", got=got, expected="a finished run", hint=hint)
    return found


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, model: KalmixForCausalLM, folder: Path) -> None:
    """Check that the model has all tokens of a tokenizer.

    Raises:
        ArgumentError: it has not.
    """
    if (most := max(tokenizer.get_vocab().values())) >= model.config.vocab_size:
        got = f"{str(folder)!r}, whose tokenizer has a token {most}"
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

    Raises:
        ArgumentError: there is no finished run, its model is damaged, or its text or tokenizer is missing or changed.
    """
    import torch

    from kalmix.training import corpus as text
    from kalmix.training import inputs
    from kalmix.training.run import Run, finished, read_history

    recipe, history = Recipe.load(folder), read_history(folder)
    if recipe.shards is not None:
        got = f"{str(folder)!r}, which was trained on token shards"
        raise ArgumentError("run", got=got, expected="a run on a text")
    if not finished(history):
        done = f"at {history[-1].get('progress', 0.0):.0%} of its training" if history else "before it saved anything"
        problem = f"{str(folder)!r} stopped {done}"
        hint = f"Continue it with: {resume_command(recipe, folder)}"
        raise ArgumentError("run", problem=problem, expected="a finished run", hint=hint)
    model, tokenizer = load(folder)
    corpus, before = text.load_corpus(recipe.text), inputs.load(folder)
    if before is not None:
        when = f"when {str(folder)!r} was trained"
        inputs.check(inputs.digests(corpus, folder), before, when, "to evaluate the run")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.nn.Module.to(model, device)
    return Run(recipe, folder, corpus, model, tokenizer, history)
