"""Rings: which blocks ranks visit."""

import pytest

from distributed import ranks
from kalmix.distributed.layout import LAYOUTS, Placement
from kalmix.distributed.ring import Ring

WORLD, LENGTH = 3, 8


def rings(layout, documents, window=None):
    """Return the ring of each of 3 ranks, with 8 tokens of each of 2 rows per rank."""
    group, placements = None, [Placement(rank, WORLD, layout) for rank in range(WORLD)]
    return [Ring.of(group, place, 2, LENGTH, documents, window) for place in placements]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("documents", [None, [*ranks.PACKED, (1, 12, 12)]])
def test_pairs_of_runs_cover_exactly_what_causal_attention_needs(layout, window, documents):
    rows = documents or [(0, 0, 24), (1, 0, 24)]
    needed = {
        (row, i, j)
        for row, start, stop in rows
        for i in range(start, stop)
        for j in range(start if window is None else max(start, i - window + 1), i + 1)
    }
    found, unneeded = set(), 0
    for ring in rings(layout, documents, window):
        for pairs in ring.pairs:
            for query, key in pairs:
                tokens = [range(x.document + x.past, x.document + x.past + x.stop - x.start) for x in (query, key)]
                visited = {(query.row, i, j) for i in tokens[0] for j in tokens[1]}
                unneeded += not visited & needed
                found |= visited
    assert needed <= found
    assert not unneeded


def test_a_rank_visits_no_more_blocks_than_documents_or_windows_reach():
    assert [ring.steps for ring in rings("contiguous", None)] == [3] * 3
    assert rings("contiguous", None, window=9)[0].steps == 2
    assert rings("contiguous", None, window=10)[0].steps == 3
    assert rings("contiguous", [(0, 0, 8), (0, 8, 12), (1, 12, 20)])[1].steps == 2
    assert rings("contiguous", [(0, 0, 8), (0, 8, 16), (1, 16, 24)])[0].steps == 1
    assert len(rings("contiguous", None)[0].pairs[2]) == 0  # later tokens
    assert [sum(map(len, ring.pairs)) for ring in rings("head-tail", None)] == [14, 14, 14]  # equal work
