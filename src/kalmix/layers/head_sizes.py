"""Number and widths of the heads of a layer."""

from __future__ import annotations

from typing import NamedTuple

from kalmix.errors import ArgumentError
from kalmix.validation import MAX_INT, check_positive_int


class Heads(NamedTuple):
    """Sizes of a memory with several heads. Value head g reads key head g // (heads / key_heads).

    Attributes:
        key_heads: H.
        heads: G, value heads; a multiple of H.
        key_width: K, columns of a key.
        value_width: V, columns of a value.
    """

    key_heads: int
    heads: int
    key_width: int
    value_width: int

    def share(self, ranks: int) -> Heads:
        """Return the sizes of one of `ranks` equal shares of the heads."""
        return Heads(self.key_heads // ranks, self.heads // ranks, self.key_width, self.value_width)

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
        """Compute sizes from the options of a layer; derive omitted ones from the hidden size.

        Args:
            hidden_size: D.
            heads: G. Default: so many that `G * head_dim` is about `share * D`.
            head_dim: K. Default: `share * D / G` if `heads` is given, otherwise a power of two from 2 to `max_width`
                that is at most D / 4.
            expand_v: V / K.
            key_heads: H, a divisor of G. Default: G.
            share: total columns of keys divided by D, for omitted sizes.
            max_width: largest default of K.

        Raises:
            ArgumentError: a size is not a positive integer, or the sizes do not match.
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
        """Total number of key columns, H K."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Total number of value columns, G V."""
        return self.heads * self.value_width


def divide_state(state: float, parts: int) -> int:
    """Return `state / parts`.

    Raises:
        ArgumentError: `state` is not a positive multiple of `parts`.
    """
    if state % parts or state < parts:
        raise ArgumentError("state", got=f"{state:g}", expected=f"a positive multiple of {parts}")
    return int(state) // parts
