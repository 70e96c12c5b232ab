"""Conversion of ridges and solvers to plain data for configuration files, and back; defaults of older files.

A value becomes a mapping of its name and fields. `Chebyshev(20)` becomes
`{"name": "chebyshev", "iterations": 20, "backward": "implicit"}`. In the other direction fields may be omitted, a name
may replace the mapping, and a number means an adaptive ridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeGuard

from kalmix.errors import ArgumentError
from kalmix.ops import Adaptive, Chebyshev, ConjugateGradient, Exact, Fixed, Ridge, Sketch, Solver

RIDGES: dict[str, type[Ridge]] = {"adaptive": Adaptive, "fixed": Fixed}
SOLVERS: dict[str, type[Solver]] = {
    "chebyshev": Chebyshev,
    "conjugate-gradient": ConjugateGradient,
    "exact": Exact,
    "sketch": Sketch,
}
_NAMES: dict[type, str] = {selected: name for name, selected in (RIDGES | SOLVERS).items()}


def has_config(value: object) -> TypeGuard[Ridge | Solver]:
    """Return whether `to_config` accepts the value."""
    return type(value) in _NAMES


def to_config(value: Ridge | Solver) -> dict[str, Any]:
    """Convert a ridge or solver to a mapping of plain data. `ridge_from_config` and `solver_from_config` invert it."""
    settings = {field.name: getattr(value, field.name) for field in fields(value)}
    return {"name": _NAMES[type(value)]} | {n: to_config(x) if type(x) in _NAMES else x for n, x in settings.items()}


def ridge_from_config(value: object) -> Ridge:
    """Build a ridge from a ridge, its mapping, its name, or the factor of an adaptive ridge.

    Raises:
        ArgumentError: `value` is none of these.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Adaptive(value)
    return _read("ridge", value, RIDGES)


def solver_from_config(value: object) -> Solver:
    """Build a solver from a solver, its mapping or its name.

    Raises:
        ArgumentError: `value` is none of these.
    """
    return _read("solver", value, SOLVERS)


def _read(option: str, value: object, types: Mapping[str, type]) -> Any:
    if isinstance(value, tuple(types.values())):
        return value
    options: dict[str, Any] = (
        {"name": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
    )
    name = options.pop("name", None)
    selected = types.get(name) if isinstance(name, str) else None
    if selected is None:
        values = ", ".join(selected.__name__ for selected in types.values())
        expected = f"one of {values}, or a mapping with a 'name' of {', '.join(map(repr, types))}"
        raise ArgumentError(option, got=repr(value), expected=expected)
    if isinstance(options.get("solver"), str | Mapping):
        options["solver"] = solver_from_config(options["solver"])
    try:
        return selected(**options)
    except TypeError as error:
        expected = f"{selected.__name__} of {', '.join(field.name for field in fields(selected)) or 'nothing'}"
        raise ArgumentError(option, got=f"{value!r} ({error})", expected=expected) from None


def with_old_defaults(layers: object, version: int) -> object:
    """Return layers of a file with the defaults that they had in its format.

    Before format 4, "bayesian" had a decay per column of its keys.

    Args:
        layers: an entry of a list of layers, or a list of them; anything else is returned unchanged.
        version: format of the file.
    """
    if version >= 4:
        return layers
    if isinstance(layers, list | tuple):
        return [with_old_defaults(entry, version) for entry in layers]
    entry = {"mixer": layers} if isinstance(layers, str) else layers
    if isinstance(entry, Mapping) and entry.get("mixer") == "bayesian" and entry.get("decays_per_head") is None:
        return {**entry, "decays_per_head": "key"}
    return layers
