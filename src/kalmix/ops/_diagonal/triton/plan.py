"""Division of a call of `diagonal` into tiles of tokens and blocks of channels, for its Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._diagonal.scratch import CHUNK, padded_slots
from kalmix.ops._shared.gpu import num_multiprocessors
from kalmix.ops._shared.triton.tiles import FIRST_TILE, LAST_TILE, make_tile_tables
from kalmix.segments import Segments

PREFETCH = 4  # tokens whose signals are loaded while the tokens before them are computed
RESIDENT_WARPS = 32  # warps that keep a multiprocessor busy


class TilePlan(NamedTuple):
    """Division of sequences into tiles; the tiles of a sequence are consecutive and in order.

    Attributes:
        size: tokens per tile, a multiple of `CHUNK`.
        tiles: tiles per batch row; with segments, tiles in total.
        num_tiles: tiles in total.
        tile_table: int64 `[num_tiles, 5]` (sequence, first token in the flattened batch, number of tokens,
            `FIRST_TILE` if it is the first of its sequence plus `LAST_TILE` if it is the last, index of its first
            stored belief); a placeholder without segments, where kernels compute these numbers.
        sequence_table: int64 `[N, 5]` (first tile, first token, number of tokens, last tile plus 1, index of the first
            stored belief), or a placeholder.
        single_tile: whether no sequence has more than one tile.
    """

    size: int
    tiles: int
    num_tiles: int
    tile_table: Tensor
    sequence_table: Tensor
    single_tile: bool


def plan_tiles(batch: int, length: int, size: int, segments: Segments | None, placeholder: Tensor) -> TilePlan:
    """Divide every sequence into tiles of `size` tokens, rounded by `round_tile_size`."""
    size = round_tile_size(size)
    if segments is None:
        tiles = -(-length // size)
        return TilePlan(size, tiles, batch * tiles, placeholder, placeholder, tiles == 1)
    tile_table, sequence_table = make_tile_tables(segments.rows, batch, length, size, CHUNK)
    return TilePlan(size, len(tile_table), len(tile_table), tile_table, sequence_table, length <= size)


def round_tile_size(size: int) -> int:
    """Round up to a multiple of `CHUNK`, at most 2^15, so that offsets inside a tile fit 32 bits."""
    return min(-(-size // CHUNK) * CHUNK, 1 << 15)


def forward_tile_size(v: Tensor, slots: int) -> int:
    """Return the tokens per tile of the forward pass, not rounded, for values `[B, T, G, V]` and K slots."""
    batch, length, heads, channels = v.shape
    warps = batch * heads * -(-channels // channels_per_warp(slots, 4))
    return tile_size(length, warps, RESIDENT_WARPS * num_multiprocessors(v.device))


def tile_size(length: int, warps: int, resident: int) -> int:
    """Return the tokens per tile.

    With several tiles per sequence the tokens are filtered twice. So there is one tile per sequence if this gives a
    fifth of the resident warps, which hide most latencies. Otherwise there are enough tiles for four rounds of resident
    warps or, if these tiles had fewer than 64 tokens, for one round.

    Args:
        length: tokens per sequence.
        warps: warps for one tile of every sequence.
        resident: warps that the GPU runs at once.
    """
    largest = max(1, length // 64)
    tiles = min(largest, 4 * resident // warps)
    if 5 * warps >= resident:
        tiles = 1
    elif tiles * warps < 2 * resident:
        tiles = max(1, min(tiles, resident // warps))
    return -(-length // tiles)


def is_ragged(length: int, segments: Segments | Tensor | None, group: int = PREFETCH) -> bool:
    """Return whether the length of a sequence may be no multiple of `group`, which needs code for the rest."""
    return segments is not None or length % group > 0


def channels_per_warp(slots: int, cells: int) -> int:
    """Return the channels per warp, for K slots and `cells` cells per thread."""
    return max(1, 32 * cells // padded_slots(slots))


@triton.jit
def locate_tile(tile_table, index, length, size, tiles, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return sequence, first token, tokens, whether the tile is the first and the last one, and first stored belief."""
    if PACKED:
        row = tile_table + index.to(tl.int64) * 5
        sequence, token, count = tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32)
        edges, stored = tl.load(row + 3), tl.load(row + 4)
        begins, last = (edges & FIRST_TILE) != 0, (edges & LAST_TILE) != 0
    else:
        sequence = (index // tiles).to(tl.int64)
        first = index % tiles * size
        token, count = sequence * length + first, tl.minimum(length - first, size)
        begins, last = first == 0, first + size >= length
        stored = sequence * tl.cdiv(length, CHUNK) + first // CHUNK
    return sequence, token, count, begins, last, stored
