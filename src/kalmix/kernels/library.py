"""What the machine offers to kernels, found out without importing it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None


@torch.compiler.assume_constant_result
def triton_interprets() -> bool:
    """Whether Triton was told to run its kernels on the CPU (`TRITON_INTERPRET=1`)."""
    return HAS_TRITON and bool(import_module("triton").knobs.runtime.interpret)
