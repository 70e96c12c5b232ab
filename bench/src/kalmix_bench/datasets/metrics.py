"""How answers are judged. Every benchmark counts in a way of its own, and the differences are larger than they look."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kalmix.errors import ArgumentError

IGNORE_INDEX = -100  # a target that is not scored

Metric = Callable[[ArrayLike, ArrayLike], float]


def micro(predicted: ArrayLike, targets: ArrayLike) -> float:
    """The part of scored tokens that are right, all of them counting alike.

    Args:
        predicted: `[n, T]` ids; targets: `[n, T]` ids, `IGNORED` where nothing is scored.

    Returns:
        Between 0 and 1; NaN where no token is scored. So do all that take these arguments.

    Raises:
        ArgumentError: shapes differ. All raise it.
    """
    right, scored = _right(predicted, targets)
    return _mean(right[scored])


def macro(predicted: ArrayLike, targets: ArrayLike, *, batch: int = 128) -> float:
    """MAD's accuracy: per class, then averaged over classes, then over batches of rows.

    A class is a token id. Its accuracy is the part of its targets that are found (its recall). A class that is
    predicted but never wanted counts as 0; one that is neither is left out. It is not `micro`: of targets
    0 0 0 1 with 0 0 2 1 predicted, 3 of 4 are right, but the classes have 2/3, 1 and 0. So torchmetrics'
    `MulticlassAccuracy(num_classes, ignore_index=-100)` counts, whose value MAD takes a batch of 128 test rows
    and averages over batches, by their rows.
    """
    _, scored = _right(predicted, targets)
    predicted, targets = np.asarray(predicted), np.asarray(targets)
    rows, found = [], []
    for start in range(0, len(targets), batch):
        part = slice(start, start + batch)
        wanted, given = targets[part][scored[part]], predicted[part][scored[part]]
        classes, place = np.unique(np.concatenate([wanted, given]), return_inverse=True)
        if len(classes):
            of = place[: len(wanted)]
            support, hits = (np.bincount(x, minlength=len(classes)) for x in (of, of[wanted == given]))
            found.append(np.mean(hits / np.maximum(support, 1)))
            rows.append(len(targets[part]))
    return float(np.average(found, weights=rows)) if rows else float("nan")


def row_accuracies(predicted: ArrayLike, targets: ArrayLike) -> NDArray[np.float64]:
    """The part of scored tokens that are right in each row, `[n]`; NaN where a row has none."""
    right, scored = _right(predicted, targets)
    count = scored.sum(1)
    return np.where(count > 0, (right & scored).sum(1) / np.maximum(count, 1), np.nan)


def mean_row_accuracy(predicted: ArrayLike, targets: ArrayLike) -> float:
    """Zoology's accuracy: of each row by itself, then the mean over rows that have anything to score."""
    found = row_accuracies(predicted, targets)
    return _mean(found[~np.isnan(found)])


def exact_match(predicted: ArrayLike, targets: ArrayLike) -> float:
    """The word problem's accuracy: the part of rows in which every scored token is right."""
    found = row_accuracies(predicted, targets)
    return _mean(found[~np.isnan(found)] == 1)


def string_match(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """RULER's score of generated text: the part of a row's references found in its answer, averaged over rows.

    Letters match whatever their case, and anywhere. RULER prints it times 100, rounded to two places.

    Raises:
        ArgumentError: there are more of one than of the other, or a row has no reference.
    """
    if len(answers) != len(references):
        raise ArgumentError("answers", got=f"{len(answers)} texts", expected=f"{len(references)}, one a row")
    if not all(references):
        raise ArgumentError("references", got="empty for a row", expected="at least one text a row")
    found = [
        np.mean([reference.lower() in answer.lower() for reference in row])
        for answer, row in zip(answers, references, strict=True)
    ]
    return _mean(np.array(found))


def _right(predicted: ArrayLike, targets: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    predicted, targets = np.asarray(predicted), np.asarray(targets)
    if predicted.shape != targets.shape or targets.ndim != 2:
        raise ArgumentError(
            "predicted", problem=f"has shape {list(predicted.shape)}", expected=f"{list(targets.shape)}, as `targets`"
        )
    return predicted == targets, targets != IGNORE_INDEX


def _mean(values: NDArray) -> float:
    return float(values.mean()) if values.size else float("nan")
