"""Model of a run before training: new weights, or those of another model."""

from __future__ import annotations

from pathlib import Path

from kalmix._extras import optional_imports

with optional_imports():
    from kalmix.models import KalmixConfig, KalmixForCausalLM
    from kalmix.models.configuration import CONFIG_FIELDS

from kalmix.errors import ArgumentError
from kalmix.training.recipe import Recipe


def build(recipe: Recipe, vocab_size: int, end: int) -> KalmixForCausalLM:
    """Build the model of a recipe with new weights.

    Args:
        recipe: settings.
        vocab_size: number of tokens.
        end: id of the end-of-text token.

    Raises:
        ArgumentError: a layer or an option is unknown, or a size is not accepted.
    """
    for name in recipe.model:
        if name not in CONFIG_FIELDS:
            raise ArgumentError("model", problem=f"contains {name!r}", expected="settings of KalmixConfig")
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    given = {"hidden_size": recipe.hidden_size, "layers": list(recipe.layers), "loss": recipe.loss}
    return KalmixForCausalLM(KalmixConfig(vocab_size=vocab_size, **given, **ids, **recipe.model))


def load_weights(model: KalmixForCausalLM, folder: Path) -> None:
    """Replace the weights of a model by those in the folder of a run, or of `save_pretrained`.

    Raises:
        ArgumentError: the folder holds no model, or its parameters have other names or shapes.
    """
    path = folder / "model" if (folder / "model").is_dir() else folder
    if not (path / "config.json").is_file():
        raise ArgumentError("initial", got=f"{str(folder)!r}, which holds no model", expected="a run or a model folder")
    saved = KalmixForCausalLM.from_pretrained(path).state_dict()
    own = model.state_dict()
    other = [name for name in {**own, **saved} if name not in own or name not in saved]
    other += [name for name in own if name in saved and own[name].shape != saved[name].shape]
    if other:
        got = f"{str(folder)!r}, whose parameter {other[0]!r} differs from that of this model"
        raise ArgumentError("initial", got=got, expected="weights of the same names and shapes")
    model.load_state_dict(saved)
