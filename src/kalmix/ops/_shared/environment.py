"""Availability of Triton, determined without importing it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None


def uses_triton_interpreter() -> bool:
    """Return whether Triton runs its kernels on the CPU, in its interpreter (`TRITON_INTERPRET=1`).

    Under `torch.compile`, which cannot trace this check, it returns True wherever Triton is installed.
    """
    return HAS_TRITON and (torch.compiler.is_compiling() or bool(import_module("triton").knobs.runtime.interpret))
