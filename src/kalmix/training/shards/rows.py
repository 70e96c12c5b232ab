"""Rows of training tokens in an order that depends on a seed alone, from any position.

A *row* is what one training sequence holds: segments of documents, or a window of the stream of all tokens. Rows are
computed in groups, so that memory does not grow with the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from kalmix.training.shards.packing import best_fit
from kalmix.training.shards.permutation import permute
from kalmix.training.shards.reader import Shards

_DOCUMENTS = 2048  # that are packed together
_WINDOWS = 1024  # of the stream, in a group


class Cursor(NamedTuple):
    """Position of the next row: epoch, group of rows in it, and row in the group."""

    epoch: int = 0
    group: int = 0
    row: int = 0


class Segment(NamedTuple):
    """Tokens of one document in a row.

    Attributes:
        document: number of the document in its split.
        start: first token of the document.
        length: number of tokens.
        ends: the document ends with this segment.
    """

    document: int
    start: int
    length: int
    ends: bool


Row = list[Segment] | int  # segments, or first token of a window


class Rows(Protocol):
    """Rows of one split in groups."""

    groups: int

    def group(self, epoch: int, number: int) -> list[Row]:
        """Return the rows of a group; the same ones at each call."""
        ...


class PackedRows:
    """Whole documents, packed into rows by best fit.

    In each epoch all documents are shuffled, and packed 2,048 at a time. Documents longer than a row are cut into
    segments of full rows and a rest, which is packed like a document.

    Args:
        shards: the documents.
        seq_len: tokens per row.
        seed: seed of the order; `None` keeps the order of the source.
    """

    def __init__(self, shards: Shards, seq_len: int, seed: int | None) -> None:
        self.shards: Shards = shards
        self.seq_len: int = seq_len
        self.seed: int | None = seed
        self.groups: int = -(-shards.documents // _DOCUMENTS)

    def group(self, epoch: int, number: int) -> list[Row]:
        count = self.shards.documents
        documents = np.arange(number * _DOCUMENTS, min((number + 1) * _DOCUMENTS, count))
        if self.seed is not None:
            documents = permute(documents, count, "documents", self.seed, epoch)
        segments = list(self._segments(documents))
        packed = best_fit(np.array([segment.length for segment in segments]), self.seq_len)
        rows: list[Row] = [[segments[item] for item in row] for row in packed]
        if self.seed is None:
            return rows
        return [rows[n] for n in permute(np.arange(len(rows)), len(rows), "rows", self.seed, epoch, number)]

    def _segments(self, documents: np.ndarray) -> Iterator[Segment]:
        lengths = self.shards.lengths(documents)
        for document, length in zip(documents.tolist(), lengths.tolist(), strict=True):
            for start in range(0, length, self.seq_len):
                size = min(self.seq_len, length - start)
                yield Segment(document, start, size, start + size == length)


class StreamRows:
    """Windows of all tokens of a split, one after the other in the order of the source, then shuffled.

    Args:
        shards: the tokens.
        seq_len: tokens per window. The token after a window is the last target, so it must exist.
        seed: seed of the order; `None` keeps the order of the source.
    """

    def __init__(self, shards: Shards, seq_len: int, seed: int | None) -> None:
        self.seq_len: int = seq_len
        self.seed: int | None = seed
        self.windows: int = max(0, shards.tokens - 1) // seq_len
        self.groups: int = -(-self.windows // _WINDOWS)

    def group(self, epoch: int, number: int) -> list[Row]:
        windows = np.arange(number * _WINDOWS, min((number + 1) * _WINDOWS, self.windows))
        if self.seed is not None:
            windows = permute(windows, self.windows, "windows", self.seed, epoch)
        return [int(window) * self.seq_len for window in windows]


def walk(rows: Rows, cursor: Cursor, epochs: int | None) -> Iterator[tuple[Row, Cursor]]:
    """Yield each row from a position on, with the position after it.

    Args:
        rows: the rows.
        cursor: first position.
        epochs: epoch at which to stop; `None` for no end.
    """
    epoch, group, row = cursor
    while rows.groups and (epochs is None or epoch < epochs):
        content = rows.group(epoch, group)
        after = (epoch, group + 1) if group + 1 < rows.groups else (epoch + 1, 0)
        for number in range(row, len(content)):
            last = number + 1 == len(content)
            yield content[number], Cursor(*after, 0) if last else Cursor(epoch, group, number + 1)
        (epoch, group), row = after, 0
