"""Best-fit packing of documents into rows of equal length."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack items into as few rows as best-fit decreasing finds.

    Items are taken from the longest to the shortest. Each goes to the row with the least free space that holds it, or
    to a new row.

    Args:
        lengths: int64 `[n]`, from 1 to `capacity`.
        capacity: length of a row.

    Returns:
        The items of each row, as indices into `lengths`. Complexity O(n log n).

    Example:
        >>> import numpy as np
        >>> from kalmix.training.shards.packing import best_fit
        >>> best_fit(np.array([3, 9, 4, 6, 7]), 10)
        [[1], [4, 0], [3, 2]]
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # free space and row, sorted; full rows are left out
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        found = bisect_left(spaces, (length, 0))
        if found == len(spaces):
            free, row = capacity, len(rows)
            rows.append([])
        else:
            free, row = spaces.pop(found)
        rows[row].append(item)
        if free > length:
            insort(spaces, (free - length, row))
    return rows
