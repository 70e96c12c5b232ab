"""Tables of the tiles of packed sequences, compared with `Segments.tiles`."""

import pytest
import torch

pytest.importorskip("triton")

from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import make_tile_tables, tile_sequences
from kalmix.segments import Segments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = {
    "some empty": ([(0, 0, 3), (0, 3, 3), (0, 4, 11), (2, 5, 5), (2, 1, 9), (1, 0, 0)], 3, 11),
    "one token": ([(0, i, i + 1) for i in range(1100)], 1, 1100),
    "one long": ([(1, 0, 500), (0, 3, 3)], 2, 500),
    "no token": ([(0, 0, 0)], 1, 5),
    "no sequence": ([], 1, 5),
}


@pytest.fixture(params=ROWS)
def packed(request):
    rows, batch, length = ROWS[request.param]
    return Segments(torch.tensor(rows, dtype=torch.int32, device=DEVICE).view(-1, 3)), batch, length


@pytest.mark.parametrize("size", [1, 4, 64])
def test_tables_have_the_tiles_of_segments(packed, size):
    segments, batch, length = packed
    tiling, tiles = tile_sequences(batch, length, size, segments, segments.rows), segments.tiles(batch, length, size)
    last = torch.isin(torch.arange(len(tiles.count), device=DEVICE), tiles.last)
    assert tiling.tile_table.equal(torch.stack([tiles.token, tiles.count, tiles.first + 2 * last], 1))
    row, start, stop = segments.rows.long().unbind(1)
    counts = (stop - start + size - 1) // size
    assert tiling.sequence_table.equal(torch.stack([counts.cumsum(0) - counts, row * length + start, stop - start], 1))


@pytest.mark.parametrize(("size", "chunk"), [(1, 1), (16, 4), (64, 32)])
def test_tables_number_the_chunks_of_all_sequences(packed, size, chunk):
    segments, batch, length = packed
    tile_table, sequence_table = make_tile_tables(segments.rows, batch, length, size, chunk)
    tiles, tokens = segments.tiles(batch, length, size), (segments.rows[:, 2] - segments.rows[:, 1]).long()
    counts, chunks = (tokens + size - 1) // size, (tokens + chunk - 1) // chunk
    first_tile, first_chunk = counts.cumsum(0) - counts, chunks.cumsum(0) - chunks
    index = torch.arange(len(tile_table), device=DEVICE) - first_tile[tiles.sequence]
    want = torch.stack(
        [
            *(tiles.sequence, tiles.token, tiles.count, (index == 0) + 2 * (index + 1 == counts[tiles.sequence])),
            first_chunk[tiles.sequence] + index * (size // chunk),
        ],
        dim=1,
    )
    assert tile_table.equal(torch.where(tiles.count[:, None] > 0, want, 0))
    assert sequence_table[:, [0, 2, 3, 4]].equal(torch.stack([first_tile, tokens, first_tile + counts, first_chunk], 1))


def test_tables_take_two_launches(packed, monkeypatch):
    launches = []
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))
    segments, batch, length = packed
    tile_sequences(batch, length, 16, segments, segments.rows)
    assert len(launches) == (2 if segments.count else 0)
