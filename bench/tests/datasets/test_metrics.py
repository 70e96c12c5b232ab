"""Metrics on examples computed by hand."""

import numpy as np
import pytest

from kalmix import ArgumentError
from kalmix_bench.datasets.metrics import (
    IGNORE_INDEX,
    exact_match,
    macro,
    mean_row_accuracy,
    micro,
    row_accuracies,
    string_match,
)

WANTED = np.array([[0, 1, 1, 2, IGNORE_INDEX]])
GIVEN = np.array([[0, 1, 0, 2, 2]])


def test_macro_is_not_micro():
    """Classes 0, 1, 2 have recalls 1, 1/2, 1."""
    assert micro(GIVEN, WANTED) == 0.75
    assert macro(GIVEN, WANTED) == pytest.approx(0.8333, abs=1e-4)


def test_a_class_that_is_only_predicted_counts_as_zero():
    assert macro(np.array([[0, 0, 2, 1]]), np.array([[0, 0, 0, 1]])) == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_macro_is_averaged_over_batches():
    given, wanted = np.array([[0], [1], [1]]), np.array([[0], [0], [1]])
    assert macro(given, wanted, batch=2) == pytest.approx((2 * (1 / 2 + 0) / 2 + 1 * 1) / 3)
    assert macro(given, wanted, batch=3) == pytest.approx((1 / 2 + 1) / 2)


def test_rows_are_weighted_equally():
    wanted = np.array([[1, 1, 1, 1], [2, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX], [IGNORE_INDEX] * 4])
    given = np.array([[1, 0, 0, 0], [2, 9, 9, 9], [9] * 4])
    assert mean_row_accuracy(given, wanted) == pytest.approx((0.25 + 1) / 2)
    assert micro(given, wanted) == pytest.approx(2 / 5)
    assert exact_match(given, wanted) == 0.5
    assert np.array_equal(row_accuracies(given, wanted), [0.25, 1, np.nan], equal_nan=True)


def test_strings_match_anywhere_in_any_case():
    assert string_match(["it is 12 and B.", "x"], [["12", "b"], ["y"]]) == 0.5
    assert string_match(["1 2"], [["1", "2", "3", "4"]]) == 0.5


def test_scores_without_scored_tokens_are_nan():
    nothing = np.full((2, 3), IGNORE_INDEX)
    for score in (micro, macro, mean_row_accuracy, exact_match):
        assert np.isnan(score(np.zeros((2, 3)), nothing))
    assert np.isnan(string_match([], []))


def test_mistakes_are_named():
    for score in (micro, macro, mean_row_accuracy, exact_match):
        with pytest.raises(ArgumentError, match=r"predicted.*\[1, 4\].*\[1, 5\]"):
            score(GIVEN[:, :4], WANTED)
    with pytest.raises(ArgumentError, match="one per row"):
        string_match(["a"], [])
    with pytest.raises(ArgumentError, match="at least one"):
        string_match(["a"], [[]])
