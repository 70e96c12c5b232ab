"""Word problems: at each element of a group, predict the product of all elements up to it.

From The Illusion of State in State-Space Models (Merrill, Petty, Sabharwal, ICML 2024, arXiv:2404.08819). Rows equal
those of the public code, jopetty/word-problem, bit for bit. A5 is the smallest non-solvable group, so its problem is
complete for NC1. S5 contains A5. Z60 is commutative.

Differences to know:

- The original code splits rows into train and test without a seed. Here the first rows are for training. No row is
  in both splits. Rows come from a Python set, so their order changes with their total number.
- To rows of length k, the original training adds all rows of two elements (`all_words(settings, 2)`), padded at the
  right. Padding and the first token are scored like any other token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

import numpy as np

from kalmix.errors import ArgumentError
from kalmix.validation import require
from kalmix_bench.datasets.metrics import exact_match, micro
from kalmix_bench.datasets.task import Integers, Published, Rows, Task

NUM_SPECIAL_IDS = 7  # ids after those of the elements: padding, the first token, and five unused ones


@dataclass(frozen=True)
class WordSettings:
    """Settings of the word problem, named as in its code.

    Attributes:
        group: A or S with a size up to 6, Z with a size up to 1000, or a product of such groups, such as "A4_x_Z5".
        k: elements per row. A row has one token more, the first.
    """

    group: str = "A5"
    k: int = 10

    def __post_init__(self) -> None:
        require(self.k >= 1, "k", self.k, "at least 1")
        multiplication_table(self.group)

    @property
    def vocab_size(self) -> int:
        return len(multiplication_table(self.group)) + NUM_SPECIAL_IDS


@cache
def multiplication_table(group: str) -> Integers:
    """Return the products of all pairs of elements, `[n, n]`; element 0 is the identity.

    Permutations are in lexicographic order. A product applies the right factor first: (a b)(i) = a(b(i)).

    Raises:
        ArgumentError: there is no group of this name.
    """
    tables = [_simple_group_table(name) for name in group.split("_x_")]
    table = tables[0]
    for other in tables[1:]:
        n = len(table) * len(other)
        table = (table[:, None, :, None] * len(other) + other[None, :, None, :]).reshape(n, n)
    table.setflags(write=False)
    return table


def _simple_group_table(name: str) -> Integers:
    kind, size = name[:1], int(name[1:]) if name[1:].isdecimal() else 0
    if kind == "Z" and 1 <= size <= 1000:
        number = np.arange(size)
        return (number[:, None] + number) % size
    if kind not in ("A", "S") or not 1 <= size <= 6:
        raise ArgumentError("group", got=repr(name), expected="a group such as 'A5', 'S5', 'Z60' or 'A4_x_Z5'")
    elements = [p for p in permutations(range(size)) if kind == "S" or _is_even(p)]
    position = {element: i for i, element in enumerate(elements)}
    return np.array([[position[tuple(a[i] for i in b)] for b in elements] for a in elements])


def _is_even(permutation: tuple[int, ...]) -> bool:
    return sum(a > b for i, a in enumerate(permutation) for b in permutation[i + 1 :]) % 2 == 0


def sample(settings: WordSettings, seed: int, train: int, test: int) -> tuple[Rows, Rows]:
    """Draw distinct rows; the first ones are for training."""
    n, count = len(multiplication_table(settings.group)), train + test
    most = n**settings.k
    require(count <= most, "train + test", count, f"at most {most} (the words of length {settings.k})")
    rng, words = random.Random(seed), set()
    while len(words) < count:
        words.add(tuple(rng.choices(range(n), k=settings.k)))
    all_words = np.array(list(words), dtype=np.int64).reshape(count, settings.k)
    return _rows(settings, all_words[:train]), _rows(settings, all_words[train:])


def all_words(settings: WordSettings, k: int) -> Rows:
    """Return all words of `k` elements in lexicographic order, n^k rows, padded at the right to `settings.k` elements.

    Raises:
        ArgumentError: `k` is below 1 or above `settings.k`.
    """
    require(1 <= k <= settings.k, "k", k, f"from 1 to {settings.k}")
    return _rows(settings, np.array(list(product(range(len(multiplication_table(settings.group))), repeat=k))))


def _rows(settings: WordSettings, words: Integers) -> Rows:
    products = multiplication_table(settings.group)
    padding, first = len(products), len(products) + 1
    count, k = words.shape
    inputs, targets = np.full((2, count, settings.k + 1), padding, dtype=np.int64)
    inputs[:, 0] = targets[:, 0] = first
    inputs[:, 1 : k + 1] = words
    product = np.zeros(count, dtype=np.int64)
    for position in range(k):
        targets[:, position + 1] = product = products[product, words[:, position]]
    return Rows(inputs, targets, {"k": np.full(count, k)})


ALL = tuple(
    Task(
        f"words/{group.lower()}",
        WordSettings(group),
        sample,
        {"sequence_accuracy": exact_match, "token_accuracy": micro},
        Published("jopetty/word-problem", 0, 800_000, 200_000, 512, tuple({"k": k} for k in range(6, 21))),
    )
    for group in ("A5", "S5", "Z60")
)
