"""Argument checks that several ops share."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.types import Filtered, belief_dtype, dependent_zero
from kalmix.validation import FLOATS, check_bool, check_dtype_and_device, check_range, check_shape

B = TypeVar("B", bound=tuple)


def check_tokens(q: Tensor, k: Tensor, v: Tensor, variance: bool = False) -> dict[str, int]:
    """Check q and k `[B, T, H, K]`, v `[B, T, G, V]` and the flag `variance`; return the sizes by letter.

    Raises:
        ArgumentError: shapes do not match, G is not a multiple of H, or dtypes or devices differ.
        NonFiniteError: values are checked here and some are NaN or infinite.
    """
    check_bool("variance", variance)
    sizes: dict[str, int] = {}
    for name, signal, layout in (("q", q, "B T H K"), ("k", k, "B T H K"), ("v", v, "B T G V")):
        check_shape(name, signal, layout, sizes)
    check_heads(sizes)
    check_dtype_and_device("q", q, FLOATS, q.device)
    for name, signal in (("q", q), ("k", k), ("v", v)):
        check_dtype_and_device(name, signal, (q.dtype,), q.device)
        check_range(name, signal)
    return sizes


def check_signal(
    name: str,
    signal: Tensor,
    layouts: tuple[str, ...],
    sizes: dict[str, int],
    like: Tensor,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
) -> None:
    """Check a signal other than q, k and v.

    Args:
        name: the argument.
        signal: its value.
        layouts: accepted layouts, such as `"B T G K"`, with different numbers of dimensions.
        sizes: sizes of the letters so far; letters of the signal's layout that it lacks are added.
        like: tensor on the expected device, in an expected dtype; the dtype of its belief is accepted, too.
        minimum, maximum: bounds of the values; `None` for no bound.
    """
    matches = [layout for layout in layouts if len(layout.split()) == getattr(signal, "ndim", 0)]
    check_shape(name, signal, matches[0] if matches else layouts[0], sizes)
    check_dtype_and_device(name, signal, (like.dtype, belief_dtype(like.dtype)), like.device)
    check_range(name, signal, minimum=minimum, maximum=maximum)


def check_heads(sizes: dict[str, int]) -> None:
    """Check that the number of value heads G is a multiple of the number of key heads H."""
    if sizes["H"] == 0 or sizes["G"] % sizes["H"]:
        raise ArgumentError(
            "v", problem=f"has {sizes['G']} heads", expected=f"a multiple of {sizes['H']} (the key heads)"
        )


def check_belief(belief: Any, prior: B, layouts: tuple[str, ...], sizes: dict[str, int]) -> B:
    """Check a belief and return it, or return the default.

    Args:
        belief: the argument, or `None`.
        prior: default belief, which has the expected type, dtype and device.
        layouts: layout of each tensor of a belief.
        sizes: sizes of the letters.
    """
    if belief is None:
        return prior
    kind = type(prior)
    if not isinstance(belief, kind):
        raise ArgumentError("belief", got=f"a {type(belief).__name__}", expected=f"a {kind.__name__}")
    for field, tensor, default, layout in zip(prior._fields, belief, prior, layouts, strict=True):  # type: ignore[attr-defined]
        check_shape(f"belief.{field}", tensor, layout, sizes)
        check_dtype_and_device(f"belief.{field}", tensor, (default.dtype,), default.device)
        check_range(f"belief.{field}", tensor, minimum=0.0 if field == "variance" else None)
    return belief


def empty_filtered(signals: tuple[Any, ...], belief: Any, variance_columns: int | None = None) -> Filtered:
    """Return the result of a call with an axis of size 0: read-outs of 0, and copies of the tensors of the belief.

    The read-outs depend on all signals, with gradient 0.

    Args:
        signals: signals of the call, q, k and v first; nested tuples and `None` are allowed.
        belief: prior; its first tensor is in the dtype of beliefs.
        variance_columns: number of columns of the variance; `None` if no variance is requested.
    """
    v, zero = signals[2], dependent_zero(*_tensors(signals))
    mean = torch.zeros_like(v) + zero.to(v.dtype)
    if variance_columns is None:
        return Filtered(mean, None, clone_belief(belief))
    variance = v.new_zeros(*v.shape[:3], variance_columns, dtype=belief[0].dtype)
    return Filtered(mean, variance + zero.to(variance.dtype), clone_belief(belief))


def _tensors(x: Any) -> list[Tensor]:
    """Return the tensors of nested tuples."""
    if isinstance(x, Tensor):
        return [x]
    return [y for part in x for y in _tensors(part)] if isinstance(x, tuple) else []


def clone_belief(belief: B) -> B:
    """Return a belief of cloned tensors."""
    return type(belief)(*(x.clone() for x in belief))
