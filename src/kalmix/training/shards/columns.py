"""Columns of rows by name. As in `datasets` and pyarrow, a dot selects a field: `meta.text` is `text` in `meta`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

MISSING: Any = object()  # value of a column that a row lacks
COLUMN_HINT = (
    "`column` (`--column`) names the column that holds the text; 'meta.text' is the field 'text' of the object 'meta'"
)
_SHOWN = 8  # names in a message
_LEVELS = 4  # of nested objects whose names are shown


def column_path(columns: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """Return the keys that lead to a column; `None` if there is none of this name.

    A key that is the whole name is preferred. If no path leads to the column, it ends at the first key whose value is
    `None`.

    Args:
        columns: a row, or a schema; nested objects are dicts.
        name: name of the column.
    """
    if name in columns:
        return (name,)
    empty: tuple[str, ...] | None = None
    for place in (n for n, character in enumerate(name) if character == "."):
        inner = columns.get(name[:place], MISSING)
        if inner is None and empty is None:
            empty = (name[:place],)
        path = column_path(inner, name[place + 1 :]) if isinstance(inner, dict) else None
        if path is not None:
            return (name[:place], *path)
    return empty


def read_column(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column in a row: `MISSING` if the row lacks it, `None` if an enclosing object is `None`."""
    if name in row:
        return row[name]
    path = column_path(row, name)
    if path is None:
        return MISSING
    value: Any = row
    for key in path:
        value = value[key]
    return value


def names(columns: Mapping[str, Any] | Iterable[str]) -> str:
    """Return the names of columns for a message, of nested objects those of their fields."""
    found = [repr(name) for name in islice(_names(columns, _LEVELS), _SHOWN + 1)]
    return ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "") if found else "none"


def _names(columns: Mapping[str, Any] | Iterable[str], levels: int) -> Iterator[str]:
    if not isinstance(columns, Mapping):
        yield from columns
        return
    for name, value in columns.items():
        if isinstance(value, dict) and value and levels > 1:
            yield from (f"{name}.{inner}" for inner in _names(value, levels - 1))
        else:
            yield name
