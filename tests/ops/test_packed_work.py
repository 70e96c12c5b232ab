"""Work and memory of packed sequences follow the sum of their lengths."""

import pytest
import torch

from kalmix import ops
from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.kv_layout import RANK_STRIDE, make_layout
from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._attend.tiles import TileInputs
from kalmix.ops._attend.visible_slots import KEY_BLOCK
from kalmix.ops._dense.sequence_batching import SequenceBatch
from kalmix.ops._shared import batching
from kalmix.ops._shared.packing import PackedChunks, chunks_by_length
from kalmix.segments import Segments

SIZE = 64
LENGTHS = {
    "one token": [1] * 700,
    "16 tokens": [16] * 256,
    "one long": [1500],
    "one long, many short": [1500, *[1] * 600],
    "every length": list(range(90)),
    "few": [3, 0, 70, 5],
}


@pytest.fixture(params=LENGTHS)
def lengths(request):
    return torch.tensor(LENGTHS[request.param])


def packed_rows(lengths):
    return Segments.packed(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])).rows


def test_chunks_hold_at_most_twice_the_tokens(lengths):
    total = int(lengths.sum())
    groups = chunks_by_length(packed_rows(lengths), 1, total, SIZE, 1)
    assert sum(len(group.index) for group in groups) <= 2 * total + SIZE * SIZE.bit_length()
    assert sum(len(group.active_counts) for group in groups) <= int(lengths.max()) // SIZE + SIZE.bit_length()  # steps
    index = torch.cat([group.index for group in groups])
    assert index[index < total].sort().values.equal(torch.arange(total))
    assert torch.cat([group.sequences for group in groups]).sort().values.equal(lengths.nonzero()[:, 0])


@pytest.mark.parametrize("reads_lengths", [True, False])
@pytest.mark.parametrize("max_entries", [1, 1 << 14])
def test_stored_states_fit_their_buffer(lengths, reads_lengths, max_entries, monkeypatch):
    monkeypatch.setattr(batching, "reads_lengths", lambda x: reads_lengths)
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", max_entries)
    rows = packed_rows(lengths)
    rows = torch.cat([rows, rows + torch.tensor([1, 0, 0], dtype=torch.int32)])
    v, state = torch.empty(2, int(lengths.sum()), 1, 4), torch.empty(len(rows), 1, 4, 4)
    slicing = batching.Slicing(v, 1, rows, 16, 64)
    counts = [part.chunks.count for part in slicing.parts()]
    assert sum(counts) <= slicing.stored_shape(state)[1] <= 2 * len(rows) + 4 * (v.shape[0] * v.shape[1] // 16 + 1)


def test_parts_without_tokens_keep_states():
    rows = torch.zeros(3, 3, dtype=torch.int32)
    (part,) = batching.Slicing(torch.empty(1, 8, 1, 4), 1, rows, 16, 64).parts()
    assert isinstance(part.chunks, PackedChunks)
    assert not part.cut([torch.ones(1, 8, 1, 4)])[0].any()


def ranks(lengths):
    """Ranks of packed tokens `[1, T]`, and bounds of their sequences."""
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.arange(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]
    return (sequence * RANK_STRIDE + position)[None], sequence


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("causal", [True, False])
def test_attend_visits_keys_of_the_sequences_of_a_tile(lengths, causal, window):
    """The chunked kernel visits whole blocks of the sequences of 64 queries, and no others."""
    rank, sequence = ranks(lengths)
    tokens, config = rank.shape[1], ScoreConfig(True, True, causal, RANK_STRIDE // 2 if window is None else window)
    x, none = torch.zeros(1, tokens, 1, 2), torch.zeros(11, 1)
    inputs = TileInputs.of(x, x, x, rank.double(), rank, none, config)
    start, stop = (lengths.cumsum(0) - lengths)[sequence], lengths.cumsum(0)[sequence]
    token = torch.arange(tokens)
    first = start if window is None else torch.maximum(start, token - window + 1)
    last = token + 1 if causal else stop if window is None else torch.minimum(stop, token + window)
    for queries in inputs.query_tiles():
        keys = [keys for keys, _ in inputs.key_tiles(queries)]
        needed = int(last[queries].max() - first[queries].min())
        assert keys[0].start <= first[queries].min() and keys[-1].stop >= last[queries].max()
        assert sum(x.stop - x.start for x in keys) <= needed + 2 * KEY_BLOCK


@pytest.mark.parametrize("reads_lengths", [True, False])
def test_dense_tiles_follow_lengths(reads_lengths, monkeypatch):
    """Results agree with the reference kernel, and with lengths read, tiles hold at most twice the tokens."""
    monkeypatch.setattr(batching, "reads_lengths", lambda x: reads_lengths)
    lengths = torch.tensor([1] * 40 + [70, 0, 5] + [3] * 20)
    tokens, width = int(lengths.sum()), 24
    segments = Segments(packed_rows(lengths))
    q, k, v = torch.randn(3, 1, tokens, 1, width, dtype=torch.float64) / width**0.5
    noise = torch.rand(2, 1, tokens, 1, dtype=torch.float64) + 0.1
    results = []
    for kernel in ("chunked", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *noise)]
        mean, _, belief = ops.dense(
            *leaves[:3], obs_noise=leaves[3], process_noise=leaves[4], segments=segments, kernel=kernel
        )
        total = mean.square().sum() + belief.mean.square().sum() + belief.covariance.square().sum()
        results.append([mean, *belief, *torch.autograd.grad(total, leaves)])
    for got, want in zip(*results, strict=True):
        assert float((got - want).detach().norm()) <= 1e-10 * float(want.detach().norm())
    batches = SequenceBatch.create(v, belief.mean, segments.rows)
    padded = sum(sum(batch.active_counts) * batch.tile_size for batch in batches)
    assert (padded <= 2 * tokens + 16 * 5) == reads_lengths


def test_attend_copies_own_tokens_of_sequences_with_a_history():
    """A row has the tokens of one sequence, not of its batch row, and the belief has room for the longest one."""
    lengths, slots = torch.tensor([1, 3, 0, 2]), 5
    q = torch.randn(1, 8, 1, 2)
    belief = HistoryBelief(torch.zeros(4, slots, 1, 2), torch.zeros(4, slots, 1, 2), *torch.zeros(2, 4, slots).double())
    belief = HistoryBelief(*belief[:3], torch.arange(slots).expand(4, slots))
    layout = make_layout(q, q, q, None, belief, Segments(packed_rows(lengths)), None)
    assert layout.q.shape[:2] == (4, 3) and layout.k.shape[:2] == (4, slots + 3)
    assert layout.to_batch(layout.q)[:, :6].equal(q[:, :6])
    occupied = (layout.final_belief.positions[:, slots:] >= 0).sum(1)
    assert occupied.equal(lengths)
