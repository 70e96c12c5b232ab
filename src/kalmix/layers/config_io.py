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
_NAMES: dict[type, str] = {kind: name for name, kind in (RIDGES | SOLVERS).items()}


def has_config(value: object) -> TypeGuard[Ridge | Solver]:
    """Whether `spell` knows the value."""
    return type(value) in _NAMES


def to_config(value: Ridge | Solver) -> dict[str, Any]:
    """The value as a mapping of plain data, which `as_ridge` or `as_solver` turns back into an equal one."""
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    return {"name": _NAMES[type(value)]} | {n: to_config(x) if type(x) in _NAMES else x for n, x in held.items()}


def ridge_from_config(given: object) -> Ridge:
    """The ridge given, spelled out, named, or as the factor of an adaptive one.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(given, int | float) and not isinstance(given, bool):
        return Adaptive(given)
    return _read("ridge", given, RIDGES)


def solver_from_config(given: object) -> Solver:
    """The solver given, spelled out or named.

    Raises:
        ArgumentError: it is none.
    """
    return _read("solver", given, SOLVERS)


def _read(what: str, given: object, kinds: Mapping[str, type]) -> Any:
    if isinstance(given, tuple(kinds.values())):
        return given
    options: dict[str, Any] = (
        {"name": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
    )
    kind = kinds.get(options.pop("name", ""))
    if kind is None:
        values = ", ".join(kind.__name__ for kind in kinds.values())
        expected = f"one of {values}, or a mapping with a 'name' of {', '.join(map(repr, kinds))}"
        raise ArgumentError(what, got=repr(given), expected=expected)
    if isinstance(options.get("solver"), str | Mapping):
        options["solver"] = solver_from_config(options["solver"])
    try:
        return kind(**options)
    except TypeError as error:
        expected = f"{kind.__name__} of {', '.join(field.name for field in fields(kind)) or 'nothing'}"
        raise ArgumentError(what, got=f"{given!r} ({error})", expected=expected) from None
