"""How many heads a memory has, and how wide."""

from __future__ import annotations

from typing import NamedTuple

from kalmix.errors import ArgumentError
from kalmix.validation import MAX_INT, check_positive_int


class Heads(NamedTuple):
    """The sizes of a memory: H key heads, K wide; G value heads, V wide; value head g reads key head g // (G / H)."""

    key_heads: int
    heads: int
    key_width: int
    value_width: int

    @classmethod
    def of(
        cls,
        hidden_size: int,
        *,
        heads: int | None,
        head_dim: int | None,
        expand_v: float,
        key_heads: int | None = None,
        share: float = 1.0,
        max_width: int = 128,
    ) -> Heads:
        """Sizes from what a layer was told and, where it was not, from the width of the model.

        Args:
            hidden_size: D.
            heads: G; as many as make `G * head_dim` about `share * D` if absent.
            head_dim: K; if absent `share * D / G` where `heads` are given, else a power of two from 2 to
                `widest`, at most D / 4, which kernels like.
            expand_v: V / K.
            key_heads: H, a divisor of G; G if absent.

        Raises:
            ArgumentError: one of them is no positive number, or they do not fit.
        """
        check_positive_int("hidden_size", hidden_size)
        if heads is not None:
            check_positive_int("heads", heads)
            head_dim = max(1, int(share * hidden_size / heads)) if head_dim is None else head_dim
        elif head_dim is None:
            head_dim = 1 << (max(2, min(max_width, hidden_size // 4)).bit_length() - 1)
        check_positive_int("head_dim", head_dim)
        heads = max(1, int(share * hidden_size / head_dim + 0.5)) if heads is None else heads
        check_positive_int("heads", heads)
        key_heads = heads if key_heads is None else key_heads
        check_positive_int("key_heads", key_heads)
        if heads % key_heads:
            raise ArgumentError("key_heads", got=key_heads, expected=f"a divisor of {heads} (heads)")
        number = isinstance(expand_v, int | float) and 0 < expand_v <= MAX_INT
        value_width = round(expand_v * head_dim) if number else 0
        if value_width < 1 or abs(value_width - expand_v * head_dim) > 1e-6:
            raise ArgumentError(
                "expand_v",
                got=repr(expand_v),
                expected=f"a number for which {head_dim} * expand_v is a positive integer",
            )
        return cls(key_heads, heads, head_dim, value_width)

    @property
    def keys(self) -> int:
        """Columns of all keys."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Columns of all values."""
        return self.heads * self.value_width


def divide_state(state: float, parts: int) -> int:
    """Return an equal part of `state` numbers.

    Raises:
        ArgumentError: they do not divide so.
    """
    if state % parts or state < parts:
        raise ArgumentError("state", got=f"{state:g}", expected=f"a positive multiple of {parts}")
    return int(state) // parts
