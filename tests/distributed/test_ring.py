"""Rings: which blocks ranks visit, and attention to one block of keys."""

import pytest
import torch
import torch.nn.functional as F

from distributed import ranks
from kalmix.distributed import ring_attention
from kalmix.distributed.layout import LAYOUTS, Placement
from kalmix.distributed.ring import Ring
from kalmix.distributed.ring_attention import attend_block, attend_block_backward

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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_attention_to_two_blocks_is_attention_to_both(fused, causal, monkeypatch):
    """Blocks: keys that all queries see, and those of the queries themselves."""
    if not fused:
        monkeypatch.setattr(ring_attention, "_fused_kernel", lambda q: None)
        monkeypatch.setattr(ring_attention, "QUERY_TILE", 4)
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, 6, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 11, 2, 8, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask = torch.ones(6, 11, dtype=torch.bool).tril(5) if causal else None
    own = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*own, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    expected.backward(grad)

    with torch.no_grad():
        blocks = [(k[:, :5], v[:, :5], False), (k[:, 5:], v[:, 5:], causal)]
        parts, sums = zip(*(attend_block(q, *block) for block in blocks), strict=True)
        total = torch.stack(sums).logsumexp(0)
        output = sum(part * (x - total).exp()[..., None] for part, x in zip(parts, sums, strict=True))
        torch.testing.assert_close(output, expected)
        grads = [attend_block_backward(grad, q, *block[:2], output, total, block[2]) for block in blocks]
    grad_q, grad_k, grad_v = zip(*grads, strict=True)
    torch.testing.assert_close(sum(grad_q), q.grad)
    torch.testing.assert_close(torch.cat(grad_k, 1), k.grad)
    torch.testing.assert_close(torch.cat(grad_v, 1), v.grad)


def test_gpu_kernel_of_a_block_has_the_expected_arguments():
    """The kernel itself needs a GPU; the meta device checks the calls only."""
    q = torch.empty(2, 4, 32, 16, dtype=torch.bfloat16, device="meta")
    kernel = "_scaled_dot_product_flash_attention"
    output, log_weight_sum = getattr(torch.ops.aten, kernel)(q, q, q, 0.0, True)[:2]
    grads = ring_attention._fused_backward(kernel, (q, q, q, q, output, log_weight_sum), True)
    assert [x.shape for x in grads] == [q.shape] * 3
