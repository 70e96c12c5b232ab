"""What the machine offers to kernels, found out without importing it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None


def triton_interprets() -> bool:
    """Whether Triton runs its kernels on the CPU (`TRITON_INTERPRET=1`); a compiler cannot ask, and trusts."""
    return HAS_TRITON and (torch.compiler.is_compiling() or bool(import_module("triton").knobs.runtime.interpret))
