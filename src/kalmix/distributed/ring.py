"""Ring of ranks: blocks of tokens travel from rank to rank, so that no rank holds the tokens of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kalmix.distributed.layout import Placement, Run, find_runs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

Pair = tuple[Run, Run]  # of one document: a run of queries, and one of keys that some of its queries attend to


class Ring(NamedTuple):
    """Ranks of a group, each of which sends blocks to the next one.

    Attributes:
        group: the process group.
        rank: this rank.
        world: number of ranks.
        pairs: for each rank, the pairs of own runs and its runs that causal attention needs.
        steps: number of blocks that each rank visits, its own included.
    """

    group: ProcessGroup
    rank: int
    world: int
    pairs: list[list[Pair]]
    steps: int

    @classmethod
    def of(
        cls,
        group: ProcessGroup,
        placement: Placement,
        batch: int,
        length: int,
        documents: Sequence[Sequence[int]] | None,
        window: int | None,
    ) -> Ring:
        """Build the ring for `length` tokens per rank of each of `batch` rows; see `find_runs`.

        Args:
            group: the process group.
            placement: this rank and the layout.
            batch: number of rows.
            length: number of tokens per rank.
            documents: (batch row, start, stop) in the whole sequence; by default each batch row is one document.
            window: number of tokens that a query attends to, itself included; all by default.
        """
        world = placement.world
        runs = [find_runs(Placement(i, world, placement.layout), batch, length, documents).every for i in range(world)]
        by_document = [_by_document(x) for x in runs]
        own = runs[placement.rank]
        steps = 1
        for distance in range(1, world):
            if any(_pairs(runs[i], by_document[i - distance], window) for i in range(world)):
                steps = distance + 1
        return cls(group, placement.rank, world, [_pairs(own, x, window) for x in by_document], steps)

    def visit(self, block: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield blocks and the ranks that they belong to: this rank's own `block` first, then those of earlier ranks.

        The next block is received while the caller uses the present one. Blocks of all ranks have equal shapes.
        """
        present = [x.contiguous() for x in block]
        for step in range(self.steps):
            following, works = self._exchange(present, 1) if step + 1 < self.steps else ([], [])
            yield (self.rank - step) % self.world, present
            for work in works:
                work.wait()
            present = following

    def sum_gradients(
        self, block: Sequence[Tensor], compute: Callable[[int, list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Return the gradient of this rank's own `block`, summed over all ranks.

        Args:
            block: tensors of this rank that others visit.
            compute: function of a rank and its block. It returns this rank's share of the gradient of the block.
        """
        summed: list[Tensor] = []
        arriving: list[Tensor] = []
        works: list[Work] = []
        for step, (source, present) in enumerate(self.visit(block)):
            summed = [x.contiguous() for x in compute(source, present)]
            for work in works:
                work.wait()
            if step:
                summed = [x + y for x, y in zip(summed, arriving, strict=True)]
            if step + 1 < self.steps:  # the next rank visits this block next
                arriving, works = self._exchange(summed, 1)
        if self.steps == 1:
            return summed
        home, works = self._exchange(summed, 1 - self.steps)
        for work in works:
            work.wait()
        return home

    def _exchange(self, tensors: list[Tensor], distance: int) -> tuple[list[Tensor], list[Work]]:
        """Send tensors to the rank at a distance, and receive equal shapes from the rank at minus that distance."""
        from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

        to, source = (self.rank + distance) % self.world, (self.rank - distance) % self.world
        received = [torch.empty_like(x) for x in tensors]
        sends = [P2POp(isend, x, group=self.group, group_peer=to) for x in tensors]
        receives = [P2POp(irecv, x, group=self.group, group_peer=source) for x in received]
        return received, batch_isend_irecv([*sends, *receives])


def _by_document(runs: list[Run]) -> dict[tuple[int, int], list[Run]]:
    found: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        if run.start < run.stop:
            found.setdefault((run.row, run.document), []).append(run)
    return found


def _pairs(queries: list[Run], keys: dict[tuple[int, int], list[Run]], window: int | None) -> list[Pair]:
    """Return the pairs of runs of which the last query attends to a key."""
    found = []
    for query in queries:
        for key in keys.get((query.row, query.document), ()) if query.start < query.stop else ():
            newest = key.past + key.stop - key.start - 1
            if key.past <= query.past and (window is None or newest > query.past - window):
                found.append((query, key))
    return found
