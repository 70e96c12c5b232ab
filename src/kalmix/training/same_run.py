"""Checks that a resumed run, or a branch, has the settings and the data of the run it continues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kalmix._extras import optional_imports

with optional_imports():
    from kalmix.training.shards.mixture import equal_fractions, folder_weights, fractions

from kalmix.errors import ArgumentError, abbreviate
from kalmix.training import inputs
from kalmix.training.checkpoints import read_input_digests, read_settings, run_of
from kalmix.training.recipe import CHANGEABLE, RECIPE_FILE, Recipe


def with_saved_order(recipe: Recipe, run: Path) -> Recipe:
    """Return a recipe whose shards are in the order of a run, if both name the same folders.

    The order decides which rows are read, so the run goes on as before. Folders at new paths are not recognised.

    Args:
        recipe: the recipe.
        run: folder of the run; it may hold none.
    """
    given = recipe.shards
    saved = Recipe.load(run).shards if isinstance(given, dict) and (run / RECIPE_FILE).exists() else None
    if not isinstance(given, dict) or not isinstance(saved, dict) or given.keys() != saved.keys():
        return recipe
    return replace(recipe, shards={folder: given[folder] for folder in saved})


def check_same_data(recipe: Recipe, current: inputs.Digests, checkpoint: Path) -> None:
    """Check that the data of a recipe are those of the checkpoint to resume from, in the same order and mixture."""
    saved = read_settings(checkpoint)
    if (recipe.shards is None) != (saved.shards is None):
        trained, given = ("text", "shards") if saved.shards is None else ("shards", "text")
        raise ArgumentError(
            given, problem=f"is given, and {str(checkpoint)!r} was trained on {trained}", expected=trained
        )
    _check_same_weights(recipe, saved)
    given, before = recipe.shards, saved.shards
    moved = isinstance(given, dict) and isinstance(before, dict) and given.keys() != before.keys()
    hint = "Name folders at new paths in the order of recipe.json" if moved else ""
    when = f"when {str(checkpoint)!r} was saved"
    inputs.check(current, read_input_digests(checkpoint), when, "to resume the run", hint)


def _check_same_weights(recipe: Recipe, saved: Recipe) -> None:
    """Check that shards, which may have new paths, have the weights of the run to resume."""
    if recipe.shards is None or saved.shards is None or equal_fractions(*map(fractions, (recipe.shards, saved.shards))):
        return
    given, expected = (list(folder_weights(x.shards).values()) for x in (recipe, saved))
    hint = "Only a branch (`--branch-from`) may have other weights"
    raise ArgumentError("shards", problem=f"have the weights {given}", expected=f"{expected}, in this order", hint=hint)


def check_same_recipe(recipe: Recipe, checkpoint: Path, purpose: str, changeable: Sequence[str] = CHANGEABLE) -> None:
    """Check that settings are those with which a checkpoint was saved, except for `changeable` ones."""
    given, saved = (json.loads(json.dumps(asdict(x))) for x in (recipe, read_settings(checkpoint)))
    changed = [name for name in saved if name not in changeable and given[name] != saved[name]]
    if not changed:
        return
    first, *others = changed
    values, wanted = ({name: abbreviate(repr(x[name])) for name in changed} for x in (given, saved))
    problem = ", ".join([f"is {values[first]}", *(f"`{name}` is {values[name]}" for name in others)])
    expected = ", ".join(f"`{name}` {wanted[name]}" for name in changed) if others else wanted[first]
    file = str(run_of(checkpoint) / RECIPE_FILE)
    hint = f"If {file!r} was edited, change it back; `Recipe.load` then returns the settings"
    raise ArgumentError(first, problem=problem, expected=f"{expected}, as in the run to {purpose}", hint=hint)
