"""Options that more than one bench has."""

from __future__ import annotations

import os
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
            raise ArgumentError(option, got=repr(given), expected=f"some of {','.join(known)}")
    return [name for name in known if name in asked]


def device(name: str | None) -> torch.device:
    """A device by name; a GPU if there is one and no name."""
    if name not in (None, "cpu", "cuda"):
        raise ArgumentError("device", got=repr(name), expected="cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", got="'cuda', which this machine lacks", expected="cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def gpus(devices: str | None) -> list[str]:
    """Return the GPUs to use, each as CUDA_VISIBLE_DEVICES names it; one empty name for the CPU.

    Args:
        devices: "all" GPUs of this process, "cpu", or some of its GPUs by number, with commas between. All, or the CPU
            where there is none, if absent.
    """
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    there = (visible.split(",") if visible else list(map(str, range(count))))[:count]
    if devices == "cpu" or (devices is None and not there):
        return [""]
    if devices in (None, "all"):
        if not there:
            raise ArgumentError("devices", got="'all', but this machine has no GPU", expected="cpu")
        return there
    asked = [int(number) if number.isdecimal() else -1 for number in str(devices).split(",")]
    if not set(asked) <= set(range(count)) or len(set(asked)) < len(asked):
        known = f"all, cpu, or different numbers of GPUs from 0 to {count - 1}" if count else "cpu, without GPUs"
        raise ArgumentError("devices", got=repr(devices), expected=known)
    return [there[number] for number in asked]


def positive(option: str, given: float) -> float:
    """Return a number, which must be positive and finite."""
    if not 0 < given < float("inf"):
        raise ArgumentError(option, got=given, expected="a positive number")
    return given


def preset(name: str, presets: Mapping[str, _T]) -> _T:
    """A preset by name."""
    if name not in presets:
        raise ArgumentError("preset", got=repr(name), expected=f"one of {', '.join(presets)}")
    return presets[name]


def counts(option: str, given: str) -> list[int]:
    """Return positive numbers separated by commas, in their order."""
    try:
        return [count(option, int(number)) for number in given.split(",")]
    except ValueError:
        raise ArgumentError(option, got=repr(given), expected="positive integers such as 1,2,4") from None


def count(option: str, given: int) -> int:
    """A number of things, of which there must be one."""
    if given < 1:
        raise ArgumentError(option, got=given, expected="at least 1")
    return given
