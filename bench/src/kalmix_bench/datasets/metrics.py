"""Metrics of predicted ids. Each benchmark averages differently, so their numbers cannot be compared directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kalmix.errors import ArgumentError

IGNORE_INDEX = -100  # a target that is not scored

Metric = Callable[[ArrayLike, ArrayLike], float]


def micro(predicted: ArrayLike, targets: ArrayLike) -> float:
    """Return the fraction of scored tokens that are predicted correctly.

    Args:
        predicted: `[n, T]` ids.
        targets: `[n, T]` ids, `IGNORE_INDEX` at tokens that are not scored.

    Returns:
        Between 0 and 1; NaN if no token is scored.

    Raises:
        ArgumentError: the shapes differ.
    """
    right, scored = _right(predicted, targets)
    return _mean(right[scored])


def macro(predicted: ArrayLike, targets: ArrayLike, *, batch: int = 128) -> float:
    """Return MAD's accuracy: a mean over classes, computed per batch of rows and then averaged over batches.

    A class is a token id. Its accuracy is its recall: the fraction of its targets that are predicted. A class that is
    predicted but is not a target counts as 0. This differs from `micro`: for targets 0 0 0 1 and predictions 0 0 2 1,
    3 of 4 tokens are correct, but the classes have 2/3, 1 and 0. It equals torchmetrics'
    `MulticlassAccuracy(num_classes, ignore_index=-100)` per batch; batches are weighted by their rows.

    Args:
        predicted: `[n, T]` ids.
        targets: `[n, T]` ids, `IGNORE_INDEX` at tokens that are not scored.
        batch: rows per batch; MAD uses 128.

    Returns:
        Between 0 and 1; NaN if no token is scored.

    Raises:
        ArgumentError: the shapes differ.
    """
    _, scored = _right(predicted, targets)
    predicted, targets = np.asarray(predicted), np.asarray(targets)
    weights, accuracies = [], []
    for start in range(0, len(targets), batch):
        part = slice(start, start + batch)
        labels, outputs = targets[part][scored[part]], predicted[part][scored[part]]
        classes, index = np.unique(np.concatenate([labels, outputs]), return_inverse=True)
        if len(classes):
            target_class = index[: len(labels)]
            support, hits = (
                np.bincount(x, minlength=len(classes)) for x in (target_class, target_class[labels == outputs])
            )
            accuracies.append(np.mean(hits / np.maximum(support, 1)))
            weights.append(len(targets[part]))
    return float(np.average(accuracies, weights=weights)) if weights else float("nan")


def row_accuracies(predicted: ArrayLike, targets: ArrayLike) -> NDArray[np.float64]:
    """Return the fraction of correct tokens among the scored ones of each row, `[n]`; NaN for rows without any."""
    right, scored = _right(predicted, targets)
    count = scored.sum(1)
    return np.where(count > 0, (right & scored).sum(1) / np.maximum(count, 1), np.nan)


def mean_row_accuracy(predicted: ArrayLike, targets: ArrayLike) -> float:
    """Return Zoology's accuracy: the mean of `row_accuracies` over rows with at least one scored token."""
    accuracies = row_accuracies(predicted, targets)
    return _mean(accuracies[~np.isnan(accuracies)])


def exact_match(predicted: ArrayLike, targets: ArrayLike) -> float:
    """Return the word problem's accuracy: the fraction of rows in which every scored token is predicted correctly."""
    accuracies = row_accuracies(predicted, targets)
    return _mean(accuracies[~np.isnan(accuracies)] == 1)


def string_match(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return RULER's score of generated text: the mean over rows of the fraction of references found in the answer.

    Matching ignores case and accepts any position. RULER prints this score times 100, rounded to two digits.

    Raises:
        ArgumentError: the numbers of answers and of references differ, or a row has no reference.
    """
    if len(answers) != len(references):
        raise ArgumentError("answers", problem=f"has {len(answers)} texts", expected=f"{len(references)} (one per row)")
    if not all(references):
        raise ArgumentError("references", problem="is empty for a row", expected="at least one text per row")
    scores = [
        np.mean([reference.lower() in answer.lower() for reference in row])
        for answer, row in zip(answers, references, strict=True)
    ]
    return _mean(np.array(scores))


def _right(predicted: ArrayLike, targets: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    predicted, targets = np.asarray(predicted), np.asarray(targets)
    if predicted.shape != targets.shape or targets.ndim != 2:
        raise ArgumentError(
            "predicted", problem=f"has shape {list(predicted.shape)}", expected=f"{list(targets.shape)}, as `targets`"
        )
    return predicted == targets, targets != IGNORE_INDEX


def _mean(values: NDArray) -> float:
    return float(values.mean()) if values.size else float("nan")
