"""Segment ids and tiles of packed sequences, compared with direct found_ids."""

import pytest
import torch

from kalmix import Segments, checks, ops

ROWS = [(0, 0, 3), (0, 3, 3), (0, 4, 11), (2, 5, 5), (2, 1, 9), (1, 0, 0)]


def expected_ids(rows, batch, length):
    segment_ids = torch.full((batch, length), -1)
    for n, (row, start, stop) in enumerate(rows):
        segment_ids[row, start:stop] = n
    return segment_ids


def test_segment_ids():
    assert Segments.of(torch.zeros(0, 3, dtype=torch.int32)).segment_ids(2, 3).tolist() == [[-1] * 3] * 2
    assert torch.equal(Segments.of(torch.tensor(ROWS)).segment_ids(3, 11), expected_ids(ROWS, 3, 11))


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_tiles_cover_each_sequence_once_in_order(size):
    tiles = Segments.of(torch.tensor(ROWS)).tiles(3, 11, size)
    found_ids = torch.full((33,), -1)
    order = {n: [] for n in range(len(ROWS))}
    for p in range(tiles.count.shape[0]):
        n, token, count = int(tiles.sequence[p]), int(tiles.token[p]), int(tiles.count[p])
        assert count <= size
        assert bool(tiles.first[p]) == (count > 0 and not order[n])
        order[n] += range(token, token + count)
        found_ids[token : token + count] = n
        if count and token + count == ROWS[n][0] * 11 + ROWS[n][2]:
            assert int(tiles.last[n]) == p
    assert torch.equal(found_ids.view(3, 11), expected_ids(ROWS, 3, 11))
    for n, (row, start, stop) in enumerate(ROWS):
        assert order[n] == list(range(row * 11 + start, row * 11 + stop))
        assert (int(tiles.last[n]) == -1) == (start == stop)


def test_packed_padded_and_whole():
    assert Segments.packed(torch.tensor([0, 2, 2, 5])).rows.tolist() == [[0, 0, 2], [0, 2, 2], [0, 2, 5]]
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    assert Segments.padded(mask).rows.tolist() == [[0, 2, 4], [1, 0, 4], [2, 0, 1], [3, 1, 3], [4, 0, 0]]
    assert Segments.whole(2, 7).rows.tolist() == [[0, 0, 7], [1, 0, 7]]
    assert Segments.padded(torch.ones(2, 0)).rows.tolist() == [[0, 0, 0], [1, 0, 0]]


def test_a_gap_in_a_mask_raises_where_values_are_not_checked():
    gap = torch.tensor([[1, 1, 0], [1, 0, 1]])
    with checks(False), pytest.raises(RuntimeError, match="between two tokens"):
        Segments.padded(gap)
    compiled = torch.compile(lambda mask: Segments.padded(mask).rows, backend="eager", fullgraph=True)
    assert compiled(gap.flip(1)[:1]).tolist() == [[0, 1, 3]]
    with pytest.raises(RuntimeError, match="between two tokens"):
        compiled(gap)
    assert Segments.padded(gap.to("meta")).rows.shape == (2, 3)


@pytest.mark.parametrize(("decay_axes", "noise_axes"), [(5, 3), (3, 5)])
def test_diagonal_accepts_one_constant_and_one_varying_signal_on_segments(decay_axes, noise_axes):
    generator = torch.Generator().manual_seed(0)
    q, k, v, precision = (torch.rand(2, 6, 1, x, generator=generator) for x in (3, 3, 4, 4))
    constant = torch.rand(1, 3, 4, generator=generator)
    varying = constant.expand(2, 6, 1, 3, 4)
    segments = Segments.of(torch.tensor([[0, 0, 3], [0, 3, 5], [1, 1, 6]]))

    def mean(log_decay, process_noise):
        dynamics = {"log_decay": log_decay, "process_noise": process_noise}
        return ops.diagonal(q, k, v, precision=precision, **dynamics, segments=segments).mean

    log_decay = -varying if decay_axes == 5 else -constant
    got = mean(log_decay, varying if noise_axes == 5 else constant)
    torch.testing.assert_close(got, mean(-constant, constant))
