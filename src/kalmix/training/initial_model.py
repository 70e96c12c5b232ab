"""Model of a run before training: new weights, or those of another model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kalmix._extras import optional_imports

with optional_imports():
    from tokenizers import Tokenizer

    from kalmix.models import KalmixConfig, KalmixForCausalLM
    from kalmix.models.configuration import CONFIG_FIELDS

from kalmix.errors import ArgumentError
from kalmix.training.model_folder import ModelFolder, find_intact_model
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


def find_weights(initial: str) -> ModelFolder:
    """Return the folders of initial weights.

    Args:
        initial: as in `Recipe.initial`.

    Raises:
        ArgumentError: as `find_intact_model`.
    """
    return find_intact_model(Path(initial), "initial")


def load_weights(model: KalmixForCausalLM, initial: str, vocabulary: Mapping[str, int]) -> None:
    """Replace the weights of a model by those of a run, a checkpoint, or a folder of `save_pretrained`.

    Args:
        model: the model.
        initial: as in `Recipe.initial`. A tokenizer.json of these weights must have the same vocabulary.
        vocabulary: ids of the tokens of the data.

    Raises:
        ArgumentError: the folder holds no model, or its parameters have other names or shapes; the tokenizer beside
            them has another vocabulary, or cannot be read.
    """
    folder = find_weights(initial)
    saved = KalmixForCausalLM.from_pretrained(folder.weights).state_dict()
    own = model.state_dict()
    other = [name for name in {**own, **saved} if name not in own or name not in saved]
    other += [name for name in own if name in saved and own[name].shape != saved[name].shape]
    if other:
        got = f"{initial!r}, whose parameter {other[0]!r} differs from that of this model"
        raise ArgumentError("initial", got=got, expected="weights of the same names and shapes")
    _check_vocabulary(folder.tokenizer / "tokenizer.json", initial, vocabulary)
    model.load_state_dict(saved)


def _check_vocabulary(path: Path, initial: str, vocabulary: Mapping[str, int]) -> None:
    """Check that a tokenizer.json, if there is one, gives each token the id that the data have for it."""
    if not path.is_file():
        return
    try:
        saved = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # it raises no other class
        got = f"{initial!r}, whose tokenizer.json is damaged ({error})"
        raise ArgumentError("initial", got=got, expected="a run or a model folder") from None
    if saved != vocabulary:
        got = f"{initial!r}, whose tokenizer is another than that of the data"
        hint = f"`kalmix data prepare SOURCE --tokenizer {path.parent}` makes such shards"
        raise ArgumentError("initial", got=got, expected="weights that were trained with the same tokens", hint=hint)
