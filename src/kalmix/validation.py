"""Argument checks.

Shapes, dtypes and devices are always checked. Values are checked on the CPU only: reading them on a GPU would
synchronise, so there they are checked only inside `kalmix.checks()`. Values are never checked under `torch.compile` or
inside a transform of `torch.func`, where a tensor may represent a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kalmix.errors import ArgumentError, NonFiniteError, any_of

_CHECKS: ContextVar[bool | None] = ContextVar("kalmix_checks", default=None)  # None: check values on the CPU only
FLOAT32_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # inputs whose states are float32
FLOATS = (torch.float64, *FLOAT32_STATE_DTYPES)
TIME_DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32)
MAX_FLOAT = torch.finfo(torch.float32).max  # largest number accepted as an option
MAX_INT = 2**31 - 1  # largest size or count: kernels index with int32
TYPE_NAMES: dict[type[Any], str] = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    list: "a list",
    NoneType: "none",
}


@contextmanager
def checks(enabled: bool = True) -> Iterator[None]:
    """Turn value checks on or off, inside a `with` block or in a function with the decorator `@kalmix.checks()`.

    Without it, values (signs, NaN, infinity, order of times) are checked on the CPU and not on GPUs. The setting holds
    for the current thread or asyncio task. Blocks can be nested: the innermost one counts, and its end restores the
    setting before it. Compiled code and transforms of `torch.func` never check values. Shapes, dtypes and devices are
    always checked.

    Args:
        enabled: if True, check values on every device; each call of an op on a GPU then waits for the GPU. If False,
            check values on no device; the result of a call with a wrong value is undefined.

    Raises:
        ArgumentError: `enabled` is not `True` or `False`. It is raised when the block begins.

    Example:
        >>> import torch, kalmix
        >>> q = k = v = torch.full((1, 2, 1, 4), torch.nan)
        >>> with kalmix.checks(False):
        ...     y = kalmix.ops.additive(q, k, v)  # raises `ArgumentError` without the context manager
    """
    check_bool("enabled", enabled)
    token = _CHECKS.set(enabled)
    try:
        yield
    finally:
        _CHECKS.reset(token)


def can_check_values(tensor: Tensor) -> bool:
    """Return whether the values of `tensor` may be read for a check here."""
    if torch.compiler.is_compiling() or tensor.device.type == "meta" or in_transform():
        return False
    return value_checks(tensor.device)


def value_checks(device: torch.device) -> bool:
    """Return whether values on `device` are checked in eager code."""
    enabled = _CHECKS.get()
    return device.type == "cpu" if enabled is None else enabled


def in_transform() -> bool:
    """Return whether a transform of `torch.func`, or forward-mode differentiation, is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_eager() -> bool:
    """Return whether operations run as they are called: no mode, trace or transform of PyTorch intercepts them."""
    return torch._C._len_torch_dispatch_stack() == 0 and not in_transform() and not torch.jit.is_tracing()


def require(condition: bool, name: str, got: object, expected: str) -> None:
    """Raise `ArgumentError` about the argument `name` unless `condition` is true."""
    if not condition:
        raise ArgumentError(name, got=got, expected=expected)


def check_shape(name: str, tensor: Tensor, layout: str, sizes: dict[str, int]) -> None:
    """Check the shape of `tensor`, and that it is a tensor.

    Args:
        name: the argument.
        tensor: its value.
        layout: one letter a dimension, such as `"B T H K"`.
        sizes: sizes of the letters so far. Letters of `layout` that it lacks are added, with the tensor's sizes.
    """
    letters = layout.split()
    if not isinstance(tensor, Tensor):
        got = "None" if tensor is None else f"a {type(tensor).__name__}"
        raise ArgumentError(name, got=got, expected=f"a tensor {_shape_text(letters, sizes)}")
    if tensor.ndim != len(letters) or any(sizes.get(x, n) != n for x, n in zip(letters, tensor.shape, strict=True)):
        raise ArgumentError(name, problem=f"has shape {list(tensor.shape)}", expected=_shape_text(letters, sizes))
    sizes.update(zip(letters, tensor.shape, strict=True))


def _shape_text(letters: list[str], sizes: dict[str, int]) -> str:
    """Return a shape such as `[B=2, T]` for a message. `torch.compile` fixes every size that is formatted."""
    return "[" + ", ".join(f"{x}={sizes[x]}" if x in sizes else x for x in letters) + "]"


def check_dtype_and_device(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Check that `tensor` has one of `dtypes`, is on `device` and is dense."""
    if tensor.dtype not in dtypes:
        raise ArgumentError(name, problem=f"has dtype {tensor.dtype}", expected=any_of(dict.fromkeys(dtypes)))
    if tensor.device != device:
        raise ArgumentError(name, problem=f"is on {tensor.device}", expected=f"a tensor on {device}")
    if tensor.layout is not torch.strided:
        raise ArgumentError(name, problem=f"has layout {tensor.layout}", expected="a dense tensor")


def check_range(name: str, tensor: Tensor, *, minimum: float | None = None, maximum: float | None = None) -> None:
    """Check that all values are finite and lie between the bounds, if values may be read here."""
    if not can_check_values(tensor) or tensor.numel() == 0:
        return
    low, high = (float(x) for x in tensor.detach().aminmax())  # NaN if any value is NaN
    if not (-float("inf") < low <= high < float("inf")):
        raise NonFiniteError(name)
    if minimum is not None and low < minimum:
        raise ArgumentError(name, problem=f"has a minimum of {low:g}", expected=f"values of at least {minimum:g}")
    if maximum is not None and high > maximum:
        raise ArgumentError(name, problem=f"has a maximum of {high:g}", expected=f"values of at most {maximum:g}")


def check_bool(name: str, value: bool) -> None:
    """Check that an option is `True` or `False`; a tensor is not accepted."""
    if not isinstance(value, bool):
        raise ArgumentError(name, got=repr(value), expected="True or False")


def check_positive_int(name: str, value: object) -> None:
    """Check that a size or a count is an integer between 1 and 2^31 - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_INT:
        bound = f" of at most {MAX_INT}" if isinstance(value, int) and value > MAX_INT else ""
        raise ArgumentError(name, got=repr(value), expected=f"a positive integer{bound}")


def check_number(name: str, value: float, minimum: float = torch.finfo(torch.float32).tiny) -> None:
    """Check that a number is finite and at least `minimum`; by default, that it is positive."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= MAX_FLOAT:
        bound = "" if minimum < 0 else " of at least 0" if minimum == 0 else " above 0"
        raise ArgumentError(name, got=repr(value), expected=f"a finite number{bound}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Check that an option is one of its choices."""
    if value not in (known := tuple(choices)):
        raise ArgumentError(name, got=repr(value), expected=any_of(known))


def check_types(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check plain values, such as those of a configuration file, against annotations such as `int | None`.

    An integer of at most `MAX_INT` is accepted for a float; NaN and infinity are not. Values whose annotation names
    any other class are not checked.

    Args:
        hints: annotations by name.
        values: values by name.

    Raises:
        ArgumentError: a value has another type.
    """
    for name, value in values.items():
        hint = hints.get(name, Any)
        union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = {get_origin(kind) or kind for kind in union}
        if kinds <= TYPE_NAMES.keys() and not _has_type(value, kinds):
            expected = " or ".join(TYPE_NAMES[kind] for kind in TYPE_NAMES if kind in kinds)
            raise ArgumentError(name, got=repr(value), expected=expected)


def _has_type(value: Any, kinds: set[Any]) -> bool:
    if float in kinds and type(value) in (int, float):
        return math.isfinite(value) and (isinstance(value, float) or abs(value) <= MAX_INT)
    return type(value) in kinds
