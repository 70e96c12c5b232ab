"""Constant tensors that calls share, so that a call does not launch kernels to fill them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kalmix.validation import is_eager

_CONSTANTS: dict[tuple[object, ...], Tensor] = {}


def filled(value: float, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor full of `value`, to be read only: its entries are one number in memory."""

    def make() -> Tensor:
        return torch.full((), value, dtype=dtype, device=device)

    return shared((value, dtype, device), make).expand(tuple(shape))


def zeros(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return float32 zeros inside a custom op, to be read only: their entries are one number in memory.

    Each call allocates its own: before `torch.compile` captures a custom op in a CUDA graph, it runs the op in the
    memory of the graph, which is used again later.
    """
    return torch.zeros((), dtype=torch.float32, device=device).expand(tuple(shape))


def identity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an identity matrix, to be read only."""
    return shared((size, "identity", dtype, device), lambda: torch.eye(size, dtype=dtype, device=device))


def can_share_constants(device: torch.device) -> bool:
    """Return whether a tensor made here may be used in later calls.

    It may not in compiled code or inside a mode, nor in a CUDA graph, whose memory is used again.
    """
    if torch.compiler.is_compiling() or not is_eager():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def shared(key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    """Return the constant of `key`, which `make` makes if it is not stored. Only those on GPUs are stored."""
    device = key[-1]
    assert isinstance(device, torch.device)
    if torch.compiler.is_compiling() or device.type != "cuda":
        return make()
    constant = _CONSTANTS.get(key) if is_eager() else None
    if constant is None:
        with torch.inference_mode(False):  # autograd saves no tensors that are made in inference mode
            constant = make()
        if can_share_constants(device):
            torch.cuda.current_stream(device).synchronize()  # other streams may read it from now on
            _CONSTANTS[key] = constant
    return constant
