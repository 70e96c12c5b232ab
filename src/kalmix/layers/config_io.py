"""Ridges and solvers as a configuration can hold them, and back: the one place that knows both spellings.

A value becomes a mapping of its fields and its name, `Chebyshev(20)` for instance
`{"name": "chebyshev", "iterations": 20, "backward": "implicit"}`. Going back, fields may be left out, a name alone
may stand for the mapping, and a number for an adaptive ridge.
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
    """Whether `spell` knows the value."""
    return type(value) in _NAMES


def to_config(value: Ridge | Solver) -> dict[str, Any]:
    """The value as a mapping of plain data, which `as_ridge` or `as_solver` turns back into an equal one."""
    settings = {field.name: getattr(value, field.name) for field in fields(value)}
    return {"name": _NAMES[type(value)]} | {n: to_config(x) if type(x) in _NAMES else x for n, x in settings.items()}


def ridge_from_config(value: object) -> Ridge:
    """The ridge given, spelled out, named, or as the factor of an adaptive one.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Adaptive(value)
    return _read("ridge", value, RIDGES)


def solver_from_config(value: object) -> Solver:
    """The solver given, spelled out or named.

    Raises:
        ArgumentError: it is none.
    """
    return _read("solver", value, SOLVERS)


def _read(option: str, value: object, types: Mapping[str, type]) -> Any:
    if isinstance(value, tuple(types.values())):
        return value
    options: dict[str, Any] = (
        {"name": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
    )
    selected = types.get(options.pop("name", ""))
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
