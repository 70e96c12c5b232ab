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
    """Load the model and tokenizer of a run's folder, or of its model folder; no code that lies in it is run.

    Of the tokenizer only tokenizer.json is read, and generation_config.json changes nothing: options of the command
    line decide how text is generated.

    Raises:
        ArgumentError: it is missing, is no kalmix model, or is damaged.
    """
    if not folder.is_dir():
        raise ArgumentError("model", got=f"{str(folder)!r}, which does not exist", expected=_NEEDS)
    if (folder / "model").is_dir():
        folder = folder / "model"
    from transformers import GenerationConfig
    from transformers.utils import logging

    from kalmix.models import KalmixForCausalLM
    from kalmix.training.data import read_tokenizer

    logging.disable_progress_bar()
    model = KalmixForCausalLM.from_pretrained(folder)
    tokenizer = read_tokenizer(folder)
    if (most := max(tokenizer.get_vocab().values())) >= model.config.vocab_size:
        got = f"{str(folder)!r}, whose tokenizer has a token {most}"
        raise ArgumentError("model", got=got, expected=f"token ids below {model.config.vocab_size}")
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model.eval(), tokenizer


def load_run(folder: Path) -> Run:
    """Load a finished run: recipe, log, text, tokenizer and model, the model on the accelerator if there is one.

    Raises:
        ArgumentError: there is no run, it is not finished, its model is damaged, or its text or its tokenizer have
            changed or gone.
    """
    import torch

    from kalmix.training import corpus as text
    from kalmix.training import inputs
    from kalmix.training.recipe import Recipe
    from kalmix.training.run import Run, finished, read_history

    recipe, history = Recipe.load(folder), read_history(folder)
    if not finished(history):
        done = f"at {history[-1].get('progress', 0.0):.0%} of its training" if history else "before it saved anything"
        expected = f"a finished run; `kalmix train --resume --output {folder}` continues it"
        raise ArgumentError("run", got=f"{str(folder)!r}, which stopped {done}", expected=expected)
    model, tokenizer = load(folder)
    corpus, before = text.load_corpus(recipe.text), inputs.load(folder)
    if before is not None:
        when = f"when {str(folder)!r} was trained"
        inputs.check(inputs.digests(corpus, folder), before, when, "to evaluate the run")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.nn.Module.to(model, device)
    return Run(recipe, folder, corpus, model, tokenizer, history)
