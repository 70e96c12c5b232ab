"""Loading what `kalmix train` wrote, or saying clearly why not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kalmix.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from kalmix.models import KalmixForCausalLM
    from kalmix.training.run import Run

_NEEDS = "a folder that `kalmix train` wrote (the run, or its model)"


def load(folder: Path) -> tuple[KalmixForCausalLM, PreTrainedTokenizerFast]:
    """The model and tokenizer of a run's folder, or of its model folder, ready to be asked.

    Raises:
        ArgumentError: it is missing, is no kalmix model, or is damaged.
    """
    if not folder.is_dir():
        raise ArgumentError("model", got=f"{str(folder)!r}, which does not exist", needs=_NEEDS)
    if (folder / "model").is_dir():
        folder = folder / "model"
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from kalmix.models import KalmixForCausalLM
    from kalmix.training.checkpoints import fault

    wrong = fault(folder)
    if wrong is None and not (folder / "tokenizer.json").is_file():
        wrong = "tokenizer.json is missing"
    if wrong is not None:
        raise ArgumentError("model", got=f"{str(folder)!r}: {wrong}", needs=_NEEDS)
    logging.disable_progress_bar()
    try:
        model = KalmixForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ArgumentError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ArgumentError("model", got=f"{str(folder)!r}, which cannot be loaded ({error})", needs=_NEEDS) from None
    return model.eval(), tokenizer


def load_run(folder: Path) -> Run:
    """Load a finished run: recipe, log, text, tokenizer and model, the model on the accelerator if there is one.

    Raises:
        ArgumentError: there is no run, it is not finished, its model is damaged, or its text or its tokenizer have
            changed or gone.
    """
    import torch

    from kalmix import text
    from kalmix.training import inputs
    from kalmix.training.recipe import Recipe
    from kalmix.training.run import Run, finished, read_history

    recipe, history = Recipe.load(folder), read_history(folder)
    if not finished(history):
        done = f"at {history[-1].get('progress', 0.0):.0%} of its training" if history else "before it saved anything"
        needs = f"a finished run; `kalmix train --resume --output {folder}` continues it"
        raise ArgumentError("run", got=f"{str(folder)!r}, which stopped {done}", needs=needs)
    model, tokenizer = load(folder)
    corpus, before = text.load(recipe.text), inputs.load(folder)
    if before is not None:
        when = f"when {str(folder)!r} was trained"
        inputs.check(inputs.digests(corpus, folder), before, when, "to evaluate the run")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.nn.Module.to(model, device)
    return Run(recipe, folder, corpus, model, tokenizer, history)
