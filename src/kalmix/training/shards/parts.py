"""Parts of a source of documents, which workers read independently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from kalmix.training.shards.documents import Document

MANY = 64  # parts of a source, unless they would be too small or too large
_SMALLEST, _LARGEST = 1 << 20, 1 << 28  # bytes of a part


def part_bytes(total: int) -> int:
    """Return about how many bytes a part of a source of `total` bytes has."""
    return min(max(total // MANY, _SMALLEST), _LARGEST)


def part_count(total: int, rows: int) -> int:
    """Return the number of parts of a dataset of `total` bytes, at most one for each of its rows."""
    return max(1, min(rows, max(min(MANY, total // _SMALLEST), total // _LARGEST)))


class Part(NamedTuple):
    """Part of a source.

    Attributes:
        number: position among the parts.
        size: bytes, or rows of a dataset; 0 if unknown.
        slices: ranges of files, or one range of rows.
        limit: number of training tokens at which the part stops, after the document that reaches it; `None` reads all.
    """

    number: int
    size: int
    slices: tuple[Any, ...]
    limit: int | None = None


class Source(Protocol):
    """Documents in parts. Instances are sent to worker processes."""

    def fingerprint(self) -> str:
        """Return a digest that changes if the source does."""
        ...

    def parts(self) -> list[Part]:
        """Return the parts; the same ones at each call."""
        ...

    def read(self, part: Part) -> Iterator[tuple[str, Document]]:
        """Yield each document of a part, with the name of its file; `position` counts from the start of the part.

        Raises:
            OSError: the disk, the network or `datasets` fails.
        """
        ...
