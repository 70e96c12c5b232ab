"""How the Triton kernels of `diagonal` cut a call: sequences into tiles, tiles into warps."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._diagonal.scratch import SPACING, padded
from kalmix.segments import Segments

WINDOW = 4  # tokens whose signals are on their way while as many are worked on


class Plan(NamedTuple):
    """How a call is cut.

    Attributes:
        size: tokens a tile, a multiple of `SPACING`.
        tiles: tiles a batch row; with segments, tiles in all.
        count: tiles in all.
        table: int64 `[count, 5]` (sequence, first token in `[B * T]`, tokens, whether it is the last of its sequence,
            its first kept belief), or a placeholder without segments, where arithmetic says the same.
        bounds: int64 `[N, 2]`, first tile and end of each sequence, or a placeholder.
        single: no sequence has more than one tile.
    """

    size: int
    tiles: int
    count: int
    table: Tensor
    bounds: Tensor
    single: bool


def plan(batch: int, length: int, size: int, segments: Segments | None, placeholder: Tensor) -> Plan:
    """Cut every sequence into tiles of `size` tokens, rounded up to whole spacings; offsets inside one fit 32 bits."""
    size = min(triton.cdiv(size, SPACING) * SPACING, 1 << 15)
    if segments is None:
        tiles = triton.cdiv(length, size)
        return Plan(size, tiles, batch * tiles, placeholder, placeholder, tiles == 1)
    cut = segments.tiles(batch, length, size)
    tokens = (segments.rows[:, 2] - segments.rows[:, 1]).long()
    pieces, kept = (tokens + size - 1) // size, (tokens + SPACING - 1) // SPACING
    end = cut.last + 1
    within = torch.arange(len(cut.token), device=tokens.device) - (end - pieces)[cut.sequence]
    last = (within + 1 == pieces[cut.sequence]) & (cut.count > 0)
    first_kept = (kept.cumsum(0) - kept)[cut.sequence] + within * (size // SPACING)
    table = torch.stack([cut.sequence, cut.token, cut.count, last, first_kept], dim=1)
    return Plan(size, len(table), len(table), table, torch.stack([end - pieces, end], dim=1), length <= size)


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors there are to fill (on the CPU, where it only shapes tests, as on an H100 or H200)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def tile_size(length: int, warps: int, resident: int) -> int:
    """Tokens a tile, given how many warps one tile a row makes and how many fit at once.

    Tiles cost a second pass, so there is one where it fills half the GPU. Otherwise they make four rounds of warps,
    or, where that takes tiles under 64 tokens, one round; never a little more than one.
    """
    finest = max(1, length // 64)
    pieces = min(finest, 4 * resident // warps)
    if 2 * warps >= resident:
        pieces = 1
    elif pieces * warps < 2 * resident:
        pieces = max(1, min(pieces, resident // warps))
    return triton.cdiv(length, pieces)


def ragged(length: int, segments: Segments | None) -> bool:
    """Whether a sequence may end within a window: code that compiles only where it must."""
    return segments is not None or length % WINDOW > 0


def block(slots: int, cells: int) -> int:
    """Channels a warp at so many cells a thread."""
    return max(1, 32 * cells // padded(slots))


@triton.jit
def locate_tile(table, index, length, size, tiles, SPACING: tl.constexpr, PACKED: tl.constexpr):
    """A tile's sequence, first token in the batch, tokens, whether it is its sequence's last, its first kept belief."""
    if PACKED:
        row = table + index.to(tl.int64) * 5
        sequence, token, count = tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32)
        last, kept = tl.load(row + 3) != 0, tl.load(row + 4)
    else:
        sequence = (index // tiles).to(tl.int64)
        first = index % tiles * size
        token, count, last = sequence * length + first, tl.minimum(length - first, size), first + size >= length
        kept = sequence * tl.cdiv(length, SPACING) + first // SPACING
    return sequence, token, count, last, kept
