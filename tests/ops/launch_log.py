"""Log of the kernels that calls launch or precompile; nothing is compiled or run."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from kalmix import ops
from kalmix.ops._shared.triton import compile_and_launch


def import_kernels() -> None:
    """Import all Triton kernels, for a kernel stays interpreted if the interpreter is on when it is imported.

    Call this before a test turns the interpreter off, or later tests would fail.
    """
    for module in pkgutil.walk_packages(ops.__path__, "kalmix.ops."):
        if ".triton" in module.name:
            import_module(module.name)


def log_launches(monkeypatch: pytest.MonkeyPatch) -> dict[bool, set[Any]]:
    """Log launches from now on instead of executing them.

    Returns:
        Launches of dry runs (`True`) and of real calls (`False`): kernel name, kinds of arguments, options.
    """
    import_kernels()
    log: dict[bool, set[Any]] = {True: set(), False: set()}

    def record(launch: compile_and_launch.Launch) -> None:
        kinds = [(x.dtype, x.stride()[-2:]) if isinstance(x, Tensor) else type(x) for x in launch.arguments]
        log[compile_and_launch.is_dry_run()].add((launch.kernel.__name__, *kinds, *launch.options.items()))

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compile_and_launch, "_PRECOMPILED", set())
    monkeypatch.setattr(compile_and_launch, "_LAUNCH_CACHE", {})
    monkeypatch.setattr(compile_and_launch.Launch, "run", record)
    return log
