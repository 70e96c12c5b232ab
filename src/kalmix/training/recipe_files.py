"""Recipes as TOML files: those of papers, which come with kalmix, and a user's own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from inspect import get_annotations
from pathlib import Path
from typing import Any

from kalmix.errors import ArgumentError, any_of, similar_names
from kalmix.training.recipe import BRANCHED, CHANGEABLE, RECIPE_FIELDS, Layers, Recipe, as_fields, parse_layers

SUFFIX = ".toml"
MAX_REPEATS = 9999
_FOLDER = files("kalmix.training").joinpath("recipes")
_REPLACED = {"steps": ("tokens",), "tokens": ("steps",), "text": ("shards",), "shards": ("text",)}
_SETTING = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\.([^=]+?))?\s*=(.*)", re.DOTALL)


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with kalmix.

    Example:
        >>> from kalmix.training.recipe_files import recipe_names
        >>> "kla-180m" in recipe_names()
        True
    """
    found = (path.name for path in _FOLDER.iterdir() if path.name.endswith(SUFFIX))
    return sorted(name.removesuffix(SUFFIX) for name in found)


def read_recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a TOML file.

    The file has a key for each attribute of `Recipe` that differs from its default. `layers` is text as `parse_layers`
    takes it, or a list of names and tables of options. In a table, `repeat` is the number of such blocks.

    Args:
        name: path of a file, or name of a recipe that comes with kalmix (`recipe_names`).
        settings: settings that replace those of the file, as "key=value". The value is TOML; a word without quotes is a
            string, and none is `None`. A single name stands for a tuple of names, and none for an empty one.
            "key.name=value" sets one entry of a mapping. Setting `steps` unsets `tokens`, setting `shards` unsets
            `text`, and the reverse.

    Raises:
        ArgumentError: the file is missing or no TOML, or a key or a value is not one of a recipe.

    Example:
        >>> from kalmix.training.recipe_files import read_recipe
        >>> recipe = read_recipe("gpt-kla-180m", ["steps=20", "learning_rates.embeddings=0.1"])
        >>> len(recipe.layers), recipe.steps, recipe.tokens, recipe.learning_rates["embeddings"]
        (12, 20, None, 0.1)
    """
    given = _read(name)
    _check_names(given)
    return _replace(given, settings)


def change_recipe(recipe: Recipe, settings: Sequence[str], *, branch: bool = False) -> Recipe:
    """Return the recipe of a run to resume, or to branch from, with other settings.

    Args:
        recipe: settings of the run.
        settings: settings to change, as in `read_recipe`; of `kalmix.training.recipe.CHANGEABLE` only.
        branch: for a branch; `BRANCHED` may change, too.

    Raises:
        ArgumentError: a setting is unknown, has a wrong value, or affects the result of the run.

    Example:
        >>> from kalmix.training import Recipe
        >>> from kalmix.training.recipe_files import change_recipe
        >>> change_recipe(Recipe(steps=100, shards="old"), ["shards=new", "workers=2"]).shards
        'new'
    """
    known, option = ((*BRANCHED, *CHANGEABLE), "--branch-from") if branch else (CHANGEABLE, "--resume")
    for setting in settings:
        key = _parse_setting(setting)[0]
        _check_names({key: None})
        if key not in known:
            kept = "a branch keeps the settings of its run" if branch else "a resumed run keeps the settings"
            problem = f"changes `{key}`, but {kept} that affect its result"
            names = ", ".join(f"`{name}`" for name in known)
            raise ArgumentError("set", problem=problem, expected=f"only {names} with {option}")
    return _replace(dict(vars(recipe)), settings)


def _replace(given: dict[str, Any], settings: Sequence[str]) -> Recipe:
    """Return the recipe of given settings, some of them replaced."""
    replaced: dict[str, Any] = {}
    for setting in settings:
        key, entry, value = _parse_setting(setting)
        if entry is None:
            replaced[key] = value
        else:
            mapping = replaced.get(key, given.get(key, {}))
            if not isinstance(mapping, dict):
                raise ArgumentError("set", got=repr(setting), expected=f"`{key}=...`, since it is no mapping")
            replaced[key] = {**mapping, entry: value}
    _check_names(replaced)
    for key, value in replaced.items():
        for other in _REPLACED.get(key, ()) if value is not None else ():
            given.pop(other, None)
    return _to_recipe({**given, **replaced})


def _read(name: str) -> dict[str, Any]:
    """Return the contents of a file or of a recipe that comes with kalmix."""
    path = Path(name)
    known = recipe_names()
    if name in known:
        text = _FOLDER.joinpath(name + SUFFIX).read_text(encoding="utf-8")
    elif path.is_file():
        try:
            text = path.read_text(encoding="utf-8-sig")  # some editors of Windows write a byte-order mark
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError("recipe", got=f"{name!r}, which cannot be read ({error})", expected="TOML") from None
    else:
        expected = f"a TOML file, or {any_of(known)}"
        raise ArgumentError("recipe", got=f"{name!r}, which does not exist", expected=expected)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError("recipe", got=f"{name!r}, which is no TOML ({error})", expected="a TOML file") from None


def _check_names(given: dict[str, Any]) -> None:
    for key in given:
        if key not in RECIPE_FIELDS:
            initials = [name for name in RECIPE_FIELDS if "".join(x[0] for x in name.split("_")) == key]  # such as lr
            similar = initials or similar_names(key, RECIPE_FIELDS)
            hint = f"Did you mean {any_of(similar)}?" if similar else ""
            raise ArgumentError("recipe", problem=f"has no setting {key!r}", expected=any_of(RECIPE_FIELDS), hint=hint)


def _parse_setting(setting: str) -> tuple[str, str | None, Any]:
    """Parse "key=value" or "key.name=value"."""
    match = _SETTING.fullmatch(setting.strip())
    if match is None:
        raise ArgumentError("set", got=repr(setting), expected="key=value, such as steps=100")
    key, entry, text = match[1], match[2], match[3].strip()
    if text == "none":
        return key, entry, None
    try:
        return key, entry, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.startswith("{") and "dict" in get_annotations(Recipe).get(key, ""):
            hint = "Put names of folders in single quotes: shards={ 'a/b' = 1, 'c' = 2 }" if key == "shards" else ""
            got = f"{setting!r}, which is no TOML ({error})"
            raise ArgumentError("set", got=got, expected="a table of TOML", hint=hint) from None
        return key, entry, text


def _to_recipe(given: dict[str, Any]) -> Recipe:
    hints = get_annotations(Recipe, eval_str=False)
    for key, value in given.items():
        if isinstance(value, float) and value.is_integer() and "int" in hints[key] and "float" not in hints[key]:
            given[key] = int(value)  # such as 1e9 tokens
        elif isinstance(value, str | None) and hints[key].startswith("tuple[str"):
            given[key] = () if value is None else (value,)  # a single name
    layers = given.get("layers")
    if isinstance(layers, str):
        given["layers"] = parse_layers(layers)
    elif isinstance(layers, list):
        given["layers"] = _repeat(layers)
    return Recipe(**as_fields(given))


def _repeat(layers: list[Any]) -> Layers:
    """Expand the key `repeat` of tables."""
    expanded: list[str | dict[str, Any]] = []
    for entry in layers:
        options = dict(entry) if isinstance(entry, dict) else entry
        times = options.pop("repeat", 1) if isinstance(options, dict) else 1
        if not isinstance(times, int) or isinstance(times, bool) or not 1 <= times <= MAX_REPEATS:
            raise ArgumentError(
                "layers", got=f"a `repeat` of {times!r}", expected=f"an integer from 1 to {MAX_REPEATS}"
            )
        expanded += [dict(options) if isinstance(options, dict) else options for _ in range(times)]
    return tuple(expanded)
