"""Argument checks: shapes, dtypes and devices always; values only where looking at them is free.

Looking at values on a GPU would wait for it, so there it happens only inside `kalmix.checks()`. It never happens while
compiling, nor inside a transform of `torch.func`, where a tensor may stand for a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kalmix.errors import ArgumentError, NonFiniteError

_CHECKED: ContextVar[bool | None] = ContextVar("kalmix_checks", default=None)  # None: on a CPU
SINGLES = (torch.float32, torch.bfloat16, torch.float16)  # what is computed in float32
FLOATS = (torch.float64, *SINGLES)
LARGEST = torch.finfo(torch.float32).max  # of a number among options
MOST = 2**31 - 1  # of a size or a count: kernels index with int32
PLAIN: dict[type[Any], str] = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a text",
    list: "a list",
    NoneType: "none",
}


@contextmanager
def checks(enabled: bool = True) -> Iterator[None]:
    """Check values on GPUs too, which costs a synchronisation per call; or, if not `enabled`, check them nowhere."""
    token = _CHECKED.set(enabled)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def check_values(tensor: Tensor) -> bool:
    """Whether the values of `tensor` may be looked at here."""
    if torch.compiler.is_compiling() or tensor.device.type == "meta" or transformed():
        return False
    enabled = _CHECKED.get()
    return tensor.device.type == "cpu" if enabled is None else enabled


def transformed() -> bool:
    """Whether a transform of `torch.func`, or forward-mode differentiation, is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def check_shape(name: str, tensor: Tensor, layout: str, sizes: dict[str, int]) -> None:
    """Check `tensor` against a layout such as `"B T H K"`; letters not in `sizes` yet are bound by it."""
    letters = layout.split()
    needs = "[" + ", ".join(f"{x}={sizes[x]}" if x in sizes else x for x in letters) + "]"
    if not isinstance(tensor, Tensor):
        raise ArgumentError(name, got=type(tensor).__name__, needs=f"a tensor {needs}")
    if tensor.ndim != len(letters) or any(sizes.get(x, n) != n for x, n in zip(letters, tensor.shape, strict=True)):
        raise ArgumentError(name, got=list(tensor.shape), needs=needs)
    sizes.update(zip(letters, tensor.shape, strict=True))


def check_kind(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Check dtype, device, and that the tensor is dense."""
    if tensor.dtype not in dtypes:
        raise ArgumentError(name, got=tensor.dtype, needs=" or ".join(str(dtype) for dtype in dict.fromkeys(dtypes)))
    if tensor.device != device:
        raise ArgumentError(name, got=f"on {tensor.device}", needs=f"on {device}")
    if tensor.layout is not torch.strided:
        raise ArgumentError(name, got=tensor.layout, needs="a dense tensor")


def check_flag(name: str, value: bool) -> None:
    """Check that an option is true or false, and no tensor."""
    if not isinstance(value, bool):
        raise ArgumentError(name, got=repr(value), needs="True or False")


def check_range(name: str, tensor: Tensor, *, least: float | None = None, most: float | None = None) -> None:
    """Check that values are finite and lie between the bounds, where values may be looked at."""
    if not check_values(tensor) or tensor.numel() == 0:
        return
    low, high = (float(x) for x in tensor.detach().aminmax())  # NaN passes through aminmax
    if not (-float("inf") < low <= high < float("inf")):
        raise NonFiniteError(name)
    if least is not None and low < least:
        raise ArgumentError(name, got=f"as low as {low:g}", needs=f"at least {least:g}")
    if most is not None and high > most:
        raise ArgumentError(name, got=f"as high as {high:g}", needs=f"at most {most:g}")


def check_types(hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check plain values, such as a configuration holds, against annotations such as `int | None`.

    A float may be given as an integer up to `MOST`; NaN and infinity are not accepted. Where an annotation names
    another class, anything is accepted here.

    Raises:
        ArgumentError: a value is of another type; names it.
    """
    for name, value in given.items():
        hint = hints.get(name, Any)
        union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = {get_origin(kind) or kind for kind in union}
        if kinds <= PLAIN.keys() and not _is_plain(value, kinds):
            raise ArgumentError(
                name, got=repr(value), needs=" or ".join(PLAIN[kind] for kind in PLAIN if kind in kinds)
            )


def _is_plain(value: Any, kinds: set[Any]) -> bool:
    if float in kinds and type(value) in (int, float):
        return math.isfinite(value) and (isinstance(value, float) or abs(value) <= MOST)
    return type(value) in kinds
