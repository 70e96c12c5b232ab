"""Checks of the numbers and texts that a figure shows."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from kalmix.errors import ArgumentError


def read_numbers(
    name: str, values: ArrayLike, *shape: tuple[str, int | None], positive: bool = False, nan: bool = False
) -> np.ndarray:
    """Return an argument as an array of finite numbers.

    Args:
        name: the argument.
        values: array, nested list or tensor on any device.
        shape: name and size of each dimension; `None` accepts any size.
        positive: refuse numbers below 0.
        nan: accept NaN.

    Raises:
        ArgumentError: the values are not real numbers, or have another shape; one is infinite, or is NaN or below 0
            where that is not accepted.
    """
    expected = "[" + ", ".join(letter if size is None else f"{letter}={size}" for letter, size in shape) + "]"
    try:
        if isinstance(values, Tensor):  # NumPy has no bfloat16
            values = values.detach().cpu()
            values = (values if values.is_complex() else values.double()).numpy()
        numbers = np.asarray(values)
        numbers = numbers.astype(float, casting="unsafe" if numbers.dtype == object else "same_kind")
    except (TypeError, ValueError, RuntimeError) as error:
        problem = "is not an array of real numbers"
        raise ArgumentError(name, problem=problem, expected=f"an array or tensor {expected}") from error
    sizes = [size for _, size in shape]
    if numbers.ndim != len(sizes) or any(size not in (None, n) for size, n in zip(sizes, numbers.shape, strict=True)):
        raise ArgumentError(name, problem=f"has shape {list(numbers.shape)}", expected=expected)
    if not np.isfinite(numbers[~np.isnan(numbers)] if nan else numbers).all():
        problem = "contains infinity" if nan else "contains NaN or infinity"
        raise ArgumentError(name, problem=problem, expected="finite values")
    if positive and (numbers < 0).any():
        raise ArgumentError(name, problem="has negative entries", expected="values of at least 0")
    return numbers


def read_maps(weights: ArrayLike, names: Collection[str], tokens: Collection[str], **options: bool) -> np.ndarray:
    """Return attention maps `[names, tokens, tokens]` as an array; check that they are lower triangular."""
    sizes = ("names", len(names)), ("tokens", len(tokens)), ("tokens", len(tokens))
    maps = read_numbers("weights", weights, *sizes, **options)
    if np.triu(maps, 1).any():
        expected = "lower triangular maps, with one row per read-out"
        raise ArgumentError("weights", problem="has entries above the diagonal", expected=expected)
    return maps


def check_texts(name: str, texts: Collection[str]) -> None:
    """Check that an argument is a collection of at least one string."""
    if not isinstance(texts, Collection) or not len(texts) or not all(isinstance(text, str) for text in texts):
        raise ArgumentError(name, got=repr(texts), expected="a sequence of at least one string")
