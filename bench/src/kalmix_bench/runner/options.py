"""Command line options shared by several experiments, and their checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import torch
import typer

from kalmix.errors import ArgumentError, unknown_name
from kalmix.validation import check_choice

_T = TypeVar("_T")

Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if available.")]
Jobs = Annotated[int, typer.Option(help="Cells to run at once, one process each.")]
Seeds = Annotated[int, typer.Option(help="Number of seeds, from 0.")]
Commit = Annotated[str | None, typer.Option(help="Commit for the rows, where there is no git.")]


def names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names of a comma-separated option, in the order of `known`."""
    selection = [name.strip() for name in text.split(",")]
    for name in selection:
        if name not in known:
            raise unknown_name(option, name, known)
    return [name for name in known if name in selection]


def device(name: str | None) -> torch.device:
    """Return the device of this name; by default a GPU if there is one."""
    if name is not None:
        check_choice("device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", problem="is 'cuda', but PyTorch finds no GPU", expected="'cpu'")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def gpus(devices: str | None) -> list[str]:
    """Return the GPUs to use, each as a value of CUDA_VISIBLE_DEVICES; one empty string for the CPU.

    Args:
        devices: "all" GPUs of this process, "cpu", or GPU numbers separated by commas. Default: all, or the CPU without
            GPUs.
    """
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    available = (visible.split(",") if visible else list(map(str, range(count))))[:count]
    if devices == "cpu" or (devices is None and not available):
        return [""]
    if devices in (None, "all"):
        if not available:
            raise ArgumentError("devices", problem="is 'all', but PyTorch finds no GPU", expected="'cpu'")
        return available
    numbers = [int(number) if number.isdecimal() else -1 for number in str(devices).split(",")]
    if not set(numbers) <= set(range(count)) or len(set(numbers)) < len(numbers):
        known = (
            f"'all', 'cpu', or different numbers of GPUs from 0 to {count - 1}" if count else "'cpu' (there is no GPU)"
        )
        raise ArgumentError("devices", got=repr(devices), expected=known)
    return [available[number] for number in numbers]


def positive(option: str, number: float) -> float:
    """Return a number after checking that it is positive and finite."""
    if not 0 < number < float("inf"):
        raise ArgumentError(option, got=number, expected="a positive number")
    return number


def fraction(option: str, number: float) -> float:
    """Return a number after checking that it is from 0 to 1."""
    if not 0 <= number <= 1:
        raise ArgumentError(option, got=number, expected="a number from 0 to 1")
    return number


def preset(name: str, presets: Mapping[str, _T]) -> _T:
    """Return the preset of this name."""
    if name not in presets:
        raise unknown_name("preset", name, presets)
    return presets[name]


def counts(option: str, text: str) -> list[int]:
    """Return the positive integers of a comma-separated option, in order."""
    try:
        return [count(option, int(number)) for number in text.split(",")]
    except ValueError:
        raise ArgumentError(option, got=repr(text), expected="positive integers such as 1,2,4") from None


def count(option: str, number: int) -> int:
    """Return a number after checking that it is at least 1."""
    if number < 1:
        raise ArgumentError(option, got=number, expected="at least 1")
    return number
