"""Options that more than one bench has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import torch
import typer

from kalmix.errors import ArgumentError

_T = TypeVar("_T")

Device = Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")]
Jobs = Annotated[int, typer.Option(help="Cells that are run at once, each in a process of its own.")]
Seeds = Annotated[int, typer.Option(help="How many, from 0.")]


def names(option: str, given: str, known: Sequence[str]) -> list[str]:
    """Those of `known` that were asked for, separated by commas, in their order."""
    asked = [name.strip() for name in given.split(",")]
    for name in asked:
        if name not in known:
            raise ArgumentError(option, got=repr(given), needs=f"some of {','.join(known)}")
    return [name for name in known if name in asked]


def device(name: str | None) -> torch.device:
    """A device by name; a GPU if there is one and no name."""
    if name not in (None, "cpu", "cuda"):
        raise ArgumentError("device", got=repr(name), needs="cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", got="'cuda', which this machine lacks", needs="cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def preset(name: str, presets: Mapping[str, _T]) -> _T:
    """A preset by name."""
    if name not in presets:
        raise ArgumentError("preset", got=repr(name), needs=f"one of {', '.join(presets)}")
    return presets[name]


def counts(option: str, given: str) -> list[int]:
    """Return positive numbers separated by commas, in their order."""
    try:
        return [count(option, int(number)) for number in given.split(",")]
    except ValueError:
        raise ArgumentError(option, got=repr(given), needs="positive numbers with commas between, as 1,2,4") from None


def count(option: str, given: int) -> int:
    """A number of things, of which there must be one."""
    if given < 1:
        raise ArgumentError(option, got=given, needs="at least 1")
    return given
