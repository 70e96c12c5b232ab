"""What a call rehearses and what it runs, noted in place of both."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from kalmix import ops
from kalmix.ops._shared.triton import compile_and_launch as triton_launch


def import_kernels() -> None:
    """Kernels are interpreted if they are when they are imported: before notes are taken, for the tests behind."""
    for module in pkgutil.walk_packages(ops.__path__, "kalmix.ops."):
        if ".triton" in module.name:
            import_module(module.name)


def noted(monkeypatch: pytest.MonkeyPatch) -> dict[bool, set[Any]]:
    """Launches from now on, by whether they are rehearsed: kernel, kinds and strides of arguments, options."""
    import_kernels()
    notes: dict[bool, set[Any]] = {True: set(), False: set()}

    def note(step: triton_launch.Launch) -> None:
        kinds = [(x.dtype, x.stride()[-2:]) if isinstance(x, Tensor) else type(x) for x in step.arguments]
        rehearsing = triton_launch._RUN.get() is triton_launch._compile
        notes[rehearsing].add((step.kernel.__name__, *kinds, *step.options.items()))

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launch, "_COMPILED", set())
    monkeypatch.setattr(triton_launch.Launch, "run", note)
    return notes
