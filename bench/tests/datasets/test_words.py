"""Word problems equal those of the public code."""

import numpy as np
import pytest

from kalmix import ArgumentError
from kalmix_bench.datasets import make, words
from kalmix_bench.datasets.words import WordSettings, all_words, multiplication_table

from .rows import digest, ids

# group, elements of a row, digest of 200 train and 100 test rows of seed 123, as the code of jopetty/word-problem
# (8f910f9) and the algebra that it uses make them
ORIGINAL = [
    ("a5", 2, "21ac1fa2617849a9"),
    ("a5", 12, "b7a5dc652cd34e17"),
    ("a5", 20, "99f8462d704ae6a0"),
    ("z60", 12, "4e46133211d6b10b"),
    ("s5", 12, "d045155b28963b85"),
]


@pytest.mark.parametrize(("group", "k", "want"), ORIGINAL)
def test_rows_are_the_originals(group, k, want):
    """There one set of 300; its arrays of inputs and targets follow one another, whole."""
    data = make(f"words/{group}", seed=123, train=200, test=100, k=k)
    whole = make(f"words/{group}", seed=123, train=300, test=0, k=k)
    assert digest(whole) == want
    assert np.array_equal(np.concatenate([data.train.inputs, data.test.inputs]), whole.train.inputs)
    assert np.array_equal(np.concatenate([data.train.targets, data.test.targets]), whole.train.targets)
    assert len(np.unique(whole.train.inputs, axis=0)) == 300


@pytest.mark.parametrize(
    ("k", "seed", "inputs", "targets"),
    [(5, 123, "61 48 18 23 46 30", "61 48 5 28 9 18"), (2, 1, "61 39 47", "61 39 33")],
)
def test_worked_rows(k, seed, inputs, targets):
    rows = make("words/a5", seed=seed, train=10, test=0, k=k).train
    assert rows.inputs[0].tolist() == ids(inputs) and rows.targets[0].tolist() == ids(targets)


@pytest.mark.parametrize("group", ["A5", "S5", "Z60", "A4_x_Z5"])
def test_multiplication_tables_are_groups(group):
    products = multiplication_table(group)
    n = len(products)
    everyone = np.arange(n)
    assert np.array_equal(products[0], everyone) and np.array_equal(products[:, 0], everyone)
    assert all(np.array_equal(np.sort(line), everyone) for line in (*products, *products.T))
    a, b, c = np.random.default_rng(0).integers(n, size=(3, 500))
    assert np.array_equal(products[products[a, b], c], products[a, products[b, c]])
    assert np.array_equal(products, products.T) is (group == "Z60")


def test_orders_of_a5():
    products, orders = multiplication_table("A5"), []
    for element in range(60):
        held, order = element, 1
        while held:
            held, order = products[held, element], order + 1
        orders.append(order)
    assert dict(zip(*np.unique(orders, return_counts=True), strict=True)) == {1: 1, 2: 15, 3: 20, 5: 24}


def test_short_words_are_padded():
    """Padding is asked for, as there."""
    rows = all_words(WordSettings(k=4), 2)
    assert rows.inputs.shape == (3600, 5) and len(np.unique(rows.inputs, axis=0)) == 3600
    assert rows.inputs[61].tolist() == [61, 1, 1, 60, 60]
    assert rows.targets[61].tolist() == [61, 1, multiplication_table("A5")[1, 1], 60, 60]
    assert make("words/a5", seed=0, train=1, test=0).vocab_size == 67
    assert make("words/s5", seed=0, train=1, test=0).vocab_size == 127


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match="at most 3600 \\(the words of length 2\\)"):
        make("words/a5", seed=0, train=3600, test=1, k=2)
    for group in ("B5", "A7", "A", "Z0", "", "A5_x_"):
        with pytest.raises(ArgumentError, match="such as 'A5'"):
            words.WordSettings(group)
    with pytest.raises(ArgumentError, match="`k` is 0"):
        make("words/a5", seed=0, train=1, test=1, k=0)
    with pytest.raises(ArgumentError, match="from 1 to 3"):
        all_words(WordSettings(k=3), 4)
