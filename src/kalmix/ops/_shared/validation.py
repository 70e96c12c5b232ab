"""Checks that ops share."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.types import belief_dtype
from kalmix.validation import FLOATS, check_bool, check_dtype_and_device, check_range, check_shape

B = TypeVar("B", bound=tuple)


def check_tokens(q: Tensor, k: Tensor, v: Tensor, variance: bool = False) -> dict[str, int]:
    """Check what ops take: q, k `[B, T, H, K]` and v `[B, T, G, V]`, of one dtype, and a flag; return the sizes."""
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
    least: float | None = None,
    most: float | None = None,
) -> None:
    """Check a signal that has one of `layouts`, in the dtype of `like` or of its belief, between two bounds."""
    fits = [layout for layout in layouts if len(layout.split()) == getattr(signal, "ndim", 0)]
    check_shape(name, signal, fits[0] if fits else layouts[0], sizes)
    check_dtype_and_device(name, signal, (like.dtype, belief_dtype(like.dtype)), like.device)
    check_range(name, signal, minimum=least, maximum=most)


def check_heads(sizes: dict[str, int]) -> None:
    """Value heads must be a multiple of key heads."""
    if sizes["H"] == 0 or sizes["G"] % sizes["H"]:
        raise ArgumentError(
            "v", problem=f"has {sizes['G']} heads", expected=f"a multiple of {sizes['H']} (the key heads)"
        )


def check_belief(belief: Any, prior: B, layouts: tuple[str, ...], sizes: dict[str, int]) -> B:
    """The belief given, checked against `prior`, its default (of the right type, dtype and device); else `prior`."""
    if belief is None:
        return prior
    kind = type(prior)
    if not isinstance(belief, kind):
        raise ArgumentError("belief", got=f"a {type(belief).__name__}", expected=f"a {kind.__name__}")
    for field, part, default, layout in zip(prior._fields, belief, prior, layouts, strict=True):  # type: ignore[attr-defined]
        check_shape(f"belief.{field}", part, layout, sizes)
        check_dtype_and_device(f"belief.{field}", part, (default.dtype,), default.device)
        check_range(f"belief.{field}", part, minimum=0.0 if field == "variance" else None)
    return belief


def clone_belief(belief: B) -> B:
    """The belief passed through, as new tensors."""
    return type(belief)(*(part.clone() for part in belief))
