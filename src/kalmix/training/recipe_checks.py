"""Checks of the values of a recipe. `Recipe` calls them; types of plain settings are checked before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kalmix.distributed.context import ATTENTION
from kalmix.distributed.layout import LAYOUTS
from kalmix.errors import ArgumentError
from kalmix.validation import check_choice

if TYPE_CHECKING:
    from kalmix.training.recipe import Recipe

MAX_SEED = 2**32 - 1  # NumPy accepts no larger seed
INF = float("inf")
GROUPS = ("matrices", "vectors", "embeddings", "head", "dynamics")  # of `kalmix.models.optimizer_groups`
_CHOICES = {
    "tokenizer": ("bpe", "bytes"),
    "packing": ("best-fit", "stream"),
    "loss": ("cross-entropy", "marginal"),
    "schedule": ("trapezoid", "cosine", "wsd"),
    "context_layout": LAYOUTS,
    "context_attention": ATTENTION,
}
_LEAST = {
    **{"vocab_size": 257, "hidden_size": 1, "seq_len": 2, "batch_size": 1, "grad_accum": 1, "weight_decay": 0},
    **{"workers": 0, "context_parallel": 1, "keep_checkpoints": 1, "eval_tokens": 0},
}
_POSITIVE = (
    *("steps", "tokens", "minutes", "learning_rate", "batch_tokens", "reference_width", "reference_batch"),
    *("eps", "clip", "save_minutes", "save_steps", "keep_steps"),
)
_FRACTIONS = ("warmup", "cooldown", "final_learning_rate")


def check_recipe(recipe: Recipe) -> None:
    """Check the values of a recipe.

    Raises:
        ArgumentError: a value is not accepted.
    """
    _check_model(recipe)
    for name, choices in _CHOICES.items():
        check_choice(name, getattr(recipe, name), choices)
    for name, minimum in _LEAST.items():
        if getattr(recipe, name) < minimum:
            raise ArgumentError(name, got=getattr(recipe, name), expected=f"at least {minimum}")
    for name in _POSITIVE:
        value = getattr(recipe, name)
        if value is not None and not 0 < value < INF:
            raise ArgumentError(name, got=value, expected="a positive number")
    if not 0 <= recipe.seed <= MAX_SEED:
        raise ArgumentError("seed", got=recipe.seed, expected=f"an integer between 0 and {MAX_SEED}")
    _check_data(recipe)
    _check_optimizer(recipe)
    if recipe.steps is None and recipe.tokens is None and recipe.minutes is None:
        problem = "is missing, and so are `steps` and `tokens`"
        raise ArgumentError("minutes", problem=problem, expected="at least one of the three")
    if recipe.steps is not None and recipe.tokens is not None:
        raise ArgumentError("tokens", problem="and `steps` are both given", expected="one of the two")
    if not _is_list_of(recipe.report_to, str):
        raise ArgumentError("report_to", got=repr(recipe.report_to), expected="a tuple of names, such as ('wandb',)")


def _check_model(recipe: Recipe) -> None:
    if not _is_list_of(recipe.layers, str | dict):
        expected = "a tuple of layer names and mappings of options"
        raise ArgumentError("layers", got=repr(recipe.layers), expected=expected)
    if not recipe.layers:
        raise ArgumentError("layers", got="empty", expected="at least one layer")
    if not isinstance(recipe.model, Mapping) or not all(isinstance(name, str) for name in recipe.model):
        raise ArgumentError("model", got=repr(recipe.model), expected="a mapping of settings of KalmixConfig")
    for name in ("vocab_size", "hidden_size", "layers", "loss"):
        if name in recipe.model:
            raise ArgumentError("model", problem=f"contains {name!r}", expected=f"the setting `{name}` of the recipe")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name in recipe.model:
            expected = "no ids of tokens: they are those of the data"
            raise ArgumentError("model", problem=f"contains {name!r}", expected=expected)


def _check_data(recipe: Recipe) -> None:
    for name, expected in (("text", "a UTF-8 text file or folder"), ("initial", "a run or of a model's folder")):
        value = getattr(recipe, name)
        if value is not None and not value.strip():
            raise ArgumentError(name, got="empty", expected=f"the path of {expected}")
    shards = recipe.shards
    if shards is not None and recipe.text is not None:
        raise ArgumentError("shards", problem="and `text` are both given", expected="one of the two")
    if shards is not None and recipe.separate_documents:
        hint = 'With `shards`, packing="best-fit" resets the state at each document'
        raise ArgumentError("separate_documents", got=True, expected="False with `shards`", hint=hint)
    if isinstance(shards, Mapping):
        if not shards or not all(isinstance(name, str) and _is_number(x) and x > 0 for name, x in shards.items()):
            raise ArgumentError("shards", got=repr(shards), expected="a mapping from folders to positive weights")
    elif shards is not None and (not isinstance(shards, str) or not shards.strip()):
        raise ArgumentError("shards", got=repr(shards), expected="a folder of shards, or a mapping to weights")
    parts = recipe.context_parallel * (2 if recipe.context_layout == "head-tail" else 1)
    if recipe.context_parallel > 1 and recipe.seq_len % parts:
        half = "" if parts == recipe.context_parallel else " / 2, in the layout 'head-tail'"
        expected = f"a divisor of {recipe.seq_len} (seq_len){half}"
        raise ArgumentError("context_parallel", got=recipe.context_parallel, expected=expected)
    if recipe.batch_tokens is not None and recipe.batch_tokens % recipe.seq_len:
        expected = f"a multiple of {recipe.seq_len} (seq_len)"
        raise ArgumentError("batch_tokens", got=recipe.batch_tokens, expected=expected)


def _check_optimizer(recipe: Recipe) -> None:
    for name in _FRACTIONS:
        if not 0 <= getattr(recipe, name) <= 1:
            raise ArgumentError(name, got=getattr(recipe, name), expected="a fraction between 0 and 1")
    if recipe.schedule != "cosine" and recipe.warmup + recipe.cooldown > 1 + 1e-9:
        problem = f"plus `cooldown` is {recipe.warmup + recipe.cooldown:g} of the run"
        raise ArgumentError("warmup", problem=problem, expected="at most 1")
    betas = recipe.betas
    if not _is_list_of(betas, int | float) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ArgumentError("betas", got=repr(betas), expected="two numbers from 0 to below 1")
    for name in ("learning_rates", "weight_decays"):
        groups = getattr(recipe, name)
        if not isinstance(groups, Mapping) or not all(_is_number(x) and 0 <= x < INF for x in groups.values()):
            raise ArgumentError(name, got=repr(groups), expected="a mapping from groups to numbers >= 0")
        for group in groups:
            check_choice(name, group, GROUPS)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of(values: object, kind: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(x, kind) for x in values)  # pyright: ignore[reportArgumentType]
