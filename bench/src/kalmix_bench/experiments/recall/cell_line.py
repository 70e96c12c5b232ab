"""Parser of cells that are written by hand or by `--write`, with defaults for missing values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_origin, get_type_hints

from kalmix.errors import ArgumentError, any_of
from kalmix.validation import check_types
from kalmix_bench.experiments.recall.model_shape import ModelShape
from kalmix_bench.experiments.recall.protocol import Part, RecallCell, RecallProtocol
from kalmix_bench.runner.cells import Row

_T = TypeVar("_T", ModelShape, RecallProtocol)
_KINDS = {"task": str, "parts": list, "layer": str, "mixer": dict, "shape": dict, "protocol": dict, "seed": int}
_PART = {"train": int, "test": int, "settings": dict}


def parse_cell(line: Row) -> RecallCell:
    """Return the cell of a line of a cell file, or of a row of results.

    `mixer` is optional; if present, it must equal the options of `layer`. The `settings` of a part need only contain
    those
    that differ from the task's baseline. Fields of `shape` and `protocol` that have defaults are optional.

    Raises:
        ArgumentError: a key is missing or unknown, or its value has the wrong type or is out of range.
    """
    if "seconds" in line and "versions" in line:  # a row of results
        line = {name: value for name, value in line.items() if name in _KINDS}
    _check("cell", line, _KINDS, optional=("mixer",))
    parts = []
    for part in line["parts"]:
        if not isinstance(part, dict):
            raise ArgumentError("parts", problem=f"contains {part!r}", expected="objects with train, test and settings")
        _check("parts", part, _PART, optional=("settings",))
        parts.append(Part(part["train"], part["test"], tuple(sorted(part.get("settings", {}).items()))))
    if not parts or not any(part.train for part in parts) or not any(part.test for part in parts):
        raise ArgumentError("parts", problem="lacks training rows or test rows", expected="some of both")
    shape, protocol = _made(ModelShape, "shape", line["shape"]), _made(RecallProtocol, "protocol", line["protocol"])
    cell = RecallCell(line["task"], tuple(parts), line["layer"], shape, protocol, line["seed"])
    options = cell.to_dict()["mixer"]
    if line.get("mixer", options) != options:
        raise ArgumentError("mixer", got=line["mixer"], expected=f"{options} (the options of `layer`)")
    return cell


def _made(kind: type[_T], name: str, values: dict[str, Any]) -> _T:
    kinds = get_type_hints(kind)
    defaults = [field.name for field in fields(kind) if field.default is not MISSING]
    _check(name, values, kinds, optional=defaults)
    return kind(**{field: _as_python(field, value, kinds[field]) for field, value in values.items()})


def _as_python(name: str, value: Any, kind: Any) -> Any:
    """Return a JSON value with the Python type of the field: integers as floats, lists as tuples."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or any(type(number) not in (int, float) for number in value):
            raise ArgumentError(name, got=repr(value), expected="a list of numbers")
        return tuple(value)
    return float(value) if kind is float else value


def _check(name: str, values: dict[str, Any], kinds: dict[str, Any], optional: Iterable[str]) -> None:
    """Check the keys of an object and the types of its values."""
    for key in values:
        if key not in kinds:
            raise ArgumentError(name, problem=f"has the key {key!r}", expected=any_of(kinds))
    missing = [key for key in kinds if key not in values and key not in optional]
    if missing:
        raise ArgumentError(name, problem=f"lacks {', '.join(missing)}", expected=f"an object with {', '.join(kinds)}")
    check_types(kinds, values)
