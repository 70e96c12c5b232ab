"""Numbers drawn one at a time where what is drawn next depends on them: a generator without numpy's price of a call."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_LOW = 2**32 - 1


class ScalarGenerator:
    """What `numpy.random.default_rng(seed)` gives, call for call, at a fifth of the time.

    The words of PCG64 are taken a thousand at once. A number below 2^32 takes half of a word, the lower one first, by
    Lemire's method (arXiv:1805.10941); a fraction takes the next whole word, whether or not a half is left over.
    """

    def __init__(self, seed: int) -> None:
        self._words = _words(seed)
        self._halves = _halves(self._words)

    def integers(self, bound: int) -> int:
        """`integers(bound)`, for 1 <= bound < 2^32; 1 draws nothing."""
        if bound == 1:
            return 0
        product = next(self._halves) * bound
        if product & _LOW < bound:
            while product & _LOW < (_LOW + 1 - bound) % bound:
                product = next(self._halves) * bound
        return product >> 32

    def random(self) -> float:
        """`random()`."""
        return (next(self._words) >> 11) * 2.0**-53


def _words(seed: int) -> Iterator[int]:
    bits = np.random.PCG64(seed)
    while True:
        yield from bits.random_raw(1024).tolist()


def _halves(words: Iterator[int]) -> Iterator[int]:
    for word in words:
        yield word & _LOW
        yield word >> 32
