"""Division of the tokens of sequences into spans and of spans into runs of documents.

Sequences are cut into spans of equal length. A rank holds one part of each sequence, or two parts in the layout
"head-tail", and a part is one span or several. A document is one sequence of the batch: a batch row or, in packed
batches, one of its segments. A run is what a span of this rank has of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.distributed.exchange import on_device
from kalmix.errors import ArgumentError
from kalmix.segments import Segments, segments_without_checks

LAYOUTS = ("contiguous", "head-tail")


class Placement(NamedTuple):
    """Position of a rank among `world` ranks, the layout of parts: one of `LAYOUTS`, and the spans of a part."""

    rank: int
    world: int
    layout: str
    spans_per_part: int = 1

    @property
    def spans(self) -> int:
        """Number of spans on a rank."""
        return self.spans_per_part * (1 if self.layout == "contiguous" else 2)

    def holder(self, span: int) -> tuple[int, int]:
        """Return the rank that holds a span, and the index of the span on that rank."""
        part, rest = divmod(span, self.spans_per_part)
        rank, index = (part, 0) if part < self.world else (2 * self.world - 1 - part, 1)
        return rank, index * self.spans_per_part + rest

    @property
    def held(self) -> list[int]:
        """Spans of this rank, in order of time."""
        return [span for span in range(self.spans * self.world) if self.holder(span)[0] == self.rank]

    def span_length(self, length: int) -> int:
        """Return the length of a span for `length` tokens per rank."""
        if length % self.spans:
            problem = f"has {length} tokens on this rank"
            raise ArgumentError("x", problem=problem, expected="an even number in the layout 'head-tail'")
        return length // self.spans


class Run(NamedTuple):
    """Part of a document in a span of this rank.

    Attributes:
        span: index of the span on this rank.
        row: batch row.
        start, stop: its tokens, counted on this rank.
        past: number of tokens of the document before it.
        document: first token of the document, counted in the whole sequence.
    """

    span: int
    row: int
    start: int
    stop: int
    past: int
    document: int


class Runs(NamedTuple):
    """Runs of a rank, in order of spans, rows and time.

    Attributes:
        every: all runs; at least one, which may be empty.
        tails: for each span and row, the run that ends with the span: it may continue in the next span. Empty, with a
            past of 1, if no document does.
    """

    every: list[Run]
    tails: list[Run]


Tokens = tuple[int, int, int]  # batch row, first token, token after the last


class KeyRuns(NamedTuple):
    """Runs of queries and the keys that they attend to, also as tensors on the device.

    Attributes:
        queries: tokens of each run that is not empty.
        visible: the keys that the last query of each of these runs attends to; each earlier query has one less.
        extents: the same of all runs, int64 `[N, 3]`.
        query_bounds, key_bounds: cumulative numbers of tokens of `queries` and `visible`, int32 `[M + 1]`.
    """

    queries: list[Tokens]
    visible: list[Tokens]
    extents: Tensor
    query_bounds: Tensor
    key_bounds: Tensor

    @classmethod
    def of(cls, queries: list[Tokens], visible: list[Tokens], device: torch.device) -> KeyRuns:
        """Return the runs with their tensors."""
        extents = on_device(visible, torch.int64, device)
        present = [start < stop for _, start, stop in queries]
        chosen = [list(compress(tokens, present)) for tokens in (queries, visible)]
        lengths = ([stop - start for _, start, stop in tokens] for tokens in chosen)
        query_bounds, key_bounds = (on_device([0, *accumulate(x)], torch.int32, device) for x in lengths)
        return cls(chosen[0], chosen[1], extents, query_bounds, key_bounds)


def find_runs(placement: Placement, batch: int, length: int, documents: Sequence[Sequence[int]] | None) -> Runs:
    """Return the runs of a rank that holds `length` tokens of each of `batch` rows.

    Args:
        placement: the rank and the layout.
        batch: B.
        length: tokens per rank.
        documents: (batch row, start, stop) in the whole sequence; by default each batch row is one document.
    """
    size = placement.span_length(length)
    if documents is None:
        documents = [(row, 0, length * placement.world) for row in range(batch)]
    every, tails = [], []
    for index, span in enumerate(placement.held):
        begin, end, local = span * size, (span + 1) * size, index * size
        for row in range(batch):
            own = sorted((start, stop) for at, start, stop in documents if at == row and start < end and stop > begin)
            runs = [
                Run(
                    index,
                    row,
                    max(start - begin, 0) + local,
                    min(stop, end) - begin + local,
                    max(begin - start, 0),
                    start,
                )
                for start, stop in own
                if start < stop
            ]
            every += runs
            nothing = Run(index, row, local + size, local + size, 1, 0)
            tails.append(runs[-1] if runs and runs[-1].stop == local + size else nothing)
    return Runs(every or [Run(0, 0, 0, 0, 0, 0)], tails)


def segments_of(runs: list[Run], device: torch.device) -> Segments:
    """Return the runs as segments of the tokens of this rank."""
    rows = torch.tensor([(run.row, run.start, run.stop) for run in runs], dtype=torch.int32)
    return segments_without_checks(rows.to(device))


def shard_tokens(x: Tensor, placement: Placement, dim: int) -> Tensor:
    """Return the tokens of this rank from those of whole sequences."""
    count = placement.spans * placement.world
    if x.shape[dim] % count:
        problem = f"has {x.shape[dim]} tokens"
        raise ArgumentError("x", problem=problem, expected=f"a multiple of {count}", hint="Pad the sequences")
    spans = x.chunk(count, dim)
    return torch.cat([spans[span] for span in placement.held], dim)


def order_spans(x: Tensor, placement: Placement) -> list[Tensor]:
    """Return what ranks have gathered, `[world, spans per rank, ...]`, as a list of all spans in order of time."""
    return [x[rank, index] for rank, index in map(placement.holder, range(placement.spans * placement.world))]
