"""Tiles of tokens for Triton kernels: their location in the batch, and loads and stores of their rows."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kalmix.ops._shared.triton.compile_and_launch import Launch, allocate_table
from kalmix.segments import Segments

TILES_PER_STEP = 64  # rows of a tile table that a program writes at once
MIN_TABLE_PROGRAMS = 512  # programs that write a tile table, if there are fewer sequences
FIRST_TILE, LAST_TILE = tl.constexpr(1), tl.constexpr(2)  # bits of the third column of a tile table
UNSPECIALIZED = ["length", "tiles"]  # integer arguments whose values must not cause a new compilation


class Tiling(NamedTuple):
    """Division of sequences into tiles; the tiles of a sequence are consecutive and in order.

    Attributes:
        size: largest number of tokens per tile.
        tiles: tiles per batch row; with segments, tiles in total.
        num_tiles: tiles in total.
        num_sequences: number of sequences, N.
        tile_table: int64 `[num_tiles, 3]` (first token in the flattened batch, number of tokens, `FIRST_TILE` if the
            tile is the first of its sequence plus `LAST_TILE` if it is the last); a placeholder without segments, where
            kernels compute these numbers.
        sequence_table: int64 `[N, 3]` (first tile, first token, number of tokens), or a placeholder.
        packed: whether the tables hold these numbers.
    """

    size: int
    tiles: int
    num_tiles: int
    num_sequences: int
    tile_table: Tensor
    sequence_table: Tensor
    packed: bool


def tile_sequences(batch: int, length: int, size: int, segments: Segments | None, placeholder: Tensor) -> Tiling:
    """Divide every sequence into tiles of `size` tokens."""
    if segments is None:
        tiles = -(-length // size)
        return Tiling(size, tiles, batch * tiles, batch, placeholder, placeholder, False)
    tile_table, sequence_table = make_tile_tables(segments.rows, batch, length, size)
    return Tiling(size, len(tile_table), len(tile_table), segments.count, tile_table, sequence_table, True)


def make_tile_tables(
    rows: Tensor, batch: int, length: int, size: int, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Divide packed sequences into tiles of `size` tokens, in two launches; unused tiles come last.

    Args:
        rows: rows of `Segments`, `[N, 3]`.
        batch: B.
        length: T.
        size: tokens per tile.
        chunk: tokens per chunk, which divides `size`; adds columns to the tables. The chunks of all sequences are
            numbered in order.

    Returns:
        The tables of `Tiling`. With `chunk`, the rows of the first are (sequence, first token in the flattened batch,
        number of tokens, bits of the first and the last tile, first chunk), 0 if unused, and those of the second have
        two more columns: the last tile plus 1 and the first chunk.
    """
    rows, count = rows.contiguous(), rows.shape[0]
    num_tiles = batch * length // size + count if count else 0  # an upper bound known without reading lengths
    columns = (3, 3) if chunk is None else (5, 5)
    tile_table, sequence_table = (
        allocate_table(n, m, dtype=torch.int64, device=rows.device)
        for n, m in zip((num_tiles, count), columns, strict=True)
    )
    if count:
        divisors, compiled = (size, size if chunk is None else chunk), {"CHUNKS": chunk is not None}
        args = (rows, sequence_table, count, length, *divisors)
        Launch(number_tiles_kernel, (1,), args, compiled | {"BLOCK": 1024, "num_warps": 8}).run()
        turns = max(1, min(-(-length // (size * TILES_PER_STEP)), MIN_TABLE_PROGRAMS // count))
        args = (sequence_table, tile_table, count, num_tiles, *divisors)
        Launch(tile_table_kernel, (count, turns), args, compiled | {"BLOCK": TILES_PER_STEP, "num_warps": 1}).run()
    return tile_table, sequence_table


@triton.jit(do_not_specialize=["sequences", "length", "size", "chunk"])
def number_tiles_kernel(
    rows, sequence_table, sequences, length, size, chunk, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the table of sequences in one program."""
    columns: tl.constexpr = 5 if CHUNKS else 3
    tiles, chunks = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for start in range(0, sequences, BLOCK):
        n = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = n < sequences
        row = tl.load(rows + n * 3, mask=inside, other=0).to(tl.int64)
        first = tl.load(rows + n * 3 + 1, mask=inside, other=0)
        tokens = tl.load(rows + n * 3 + 2, mask=inside, other=0) - first
        own_tiles = tl.cdiv(tokens, size).to(tl.int64)
        end_tile, out = tiles + tl.cumsum(own_tiles, 0), sequence_table + n * columns
        tl.store(out, end_tile - own_tiles, mask=inside)
        tl.store(out + 1, row * length + first, mask=inside)
        tl.store(out + 2, tokens.to(tl.int64), mask=inside)
        tiles += tl.sum(own_tiles, 0)
        if CHUNKS:
            own_chunks = tl.cdiv(tokens, chunk).to(tl.int64)
            tl.store(out + 3, end_tile, mask=inside)
            tl.store(out + 4, chunks + tl.cumsum(own_chunks, 0) - own_chunks, mask=inside)
            chunks += tl.sum(own_chunks, 0)


@triton.jit(do_not_specialize=["sequences", "num_tiles", "size", "chunk"])
def tile_table_kernel(
    sequence_table, tile_table, sequences, num_tiles, size, chunk, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the tiles of one sequence to the table of tiles, and a share of its unused rows."""
    columns: tl.constexpr = 5 if CHUNKS else 3
    out_columns: tl.constexpr = 5 if CHUNKS else 3
    sequence, turn, turns = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    own = sequence_table + sequence.to(tl.int64) * columns
    first_tile, first_token, tokens = tl.load(own), tl.load(own + 1), tl.load(own + 2).to(tl.int32)
    tiles = tl.cdiv(tokens, size)
    for start in range(turn * BLOCK, tiles, turns * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = (index < tiles) & (first_tile + index < num_tiles)
        token, count = first_token + index.to(tl.int64) * size, tl.minimum(tokens - index * size, size).to(tl.int64)
        out = tile_table + (first_tile + index) * out_columns
        edges = tl.where(index == 0, FIRST_TILE, 0) + tl.where(index + 1 == tiles, LAST_TILE, 0)
        if CHUNKS:
            tl.store(out, tl.zeros([BLOCK], tl.int64) + sequence, mask=inside)
            tl.store(out + 1, token, mask=inside)
            tl.store(out + 2, count, mask=inside)
            tl.store(out + 3, edges.to(tl.int64), mask=inside)
            tl.store(out + 4, tl.load(own + 4) + index * (size // chunk), mask=inside)
        else:
            tl.store(out, token, mask=inside)
            tl.store(out + 1, count, mask=inside)
            tl.store(out + 2, edges.to(tl.int64), mask=inside)
    last = sequence_table + tl.cast(sequences - 1, tl.int64) * columns
    used = (tl.load(last) + tl.cdiv(tl.load(last + 2), size)).to(tl.int32)
    for start in range(used + (sequence * turns + turn) * BLOCK, num_tiles, sequences * turns * BLOCK):
        tile = (start + tl.arange(0, BLOCK)).to(tl.int64)
        for column in tl.static_range(out_columns):
            tl.store(tile_table + tile * out_columns + column, tl.zeros([BLOCK], tl.int64), mask=tile < num_tiles)


@lru_cache(maxsize=64)
def tile_interval(batch: int, length: int, start: int, stop: int, size: int, device: torch.device) -> Tiling:
    """Divide the tokens from `start` to `stop` of every batch row into tiles, as if they were sequences."""
    first, row = torch.arange(start, stop, size), torch.arange(batch) * length
    token, count = torch.broadcast_tensors(row[:, None] + first, (stop - first).clamp(max=size))
    sequence_table = torch.stack(
        [torch.arange(batch) * len(first), row + start, torch.full_like(row, stop - start)], dim=1
    )
    edges = torch.where(first == start, FIRST_TILE.value, 0) + torch.where(first + size >= stop, LAST_TILE.value, 0)
    columns = torch.broadcast_tensors(token, count, edges)
    tile_table = torch.stack([x.flatten() for x in columns], dim=1)
    count = len(tile_table)
    return Tiling(size, count, count, batch, tile_table.to(device), sequence_table.to(device), True)


def contiguous_rows(x: Tensor) -> Tensor:
    """Return `x` `[B, T, heads, width]`, copied unless rows are contiguous and all tokens are one stride apart."""
    usable = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if usable else x.contiguous()


@triton.constexpr_function
def num_levels(size):
    """Return log2 of a power of two."""
    return size.bit_length() - 1


@triton.jit
def locate_program(G, BLOCKS: tl.constexpr):
    """Return the tile, head and block of a program; neighbouring programs access neighbouring memory."""
    program = tl.program_id(0)
    return program // (G * BLOCKS), program // BLOCKS % G, program % BLOCKS


@triton.jit
def locate_tile(table, index, length, tiles, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Return the first token of a tile in the flattened batch (int64), and its number of tokens."""
    if PACKED:
        at = table + index.to(tl.int64) * 3
        token, count = tl.load(at), tl.load(at + 1).to(tl.int32)
    else:
        first = index % tiles * SIZE
        token, count = (index // tiles).to(tl.int64) * length + first, tl.minimum(length - first, SIZE)
    return token, count


@triton.jit
def has_neighbour(table, index, EDGE: tl.constexpr):
    """Return whether a packed sequence has a tile before this one (EDGE is `FIRST_TILE`) or after it (`LAST_TILE`)."""
    return (tl.load(table + index.to(tl.int64) * 3 + 2) & EDGE) == 0


@triton.jit
def boundary_index(token, SIZE: tl.constexpr):
    """Return an index for the boundary between two tiles of a sequence, given the first token of the second tile.

    The token is at least SIZE, and those of two such tiles are at least SIZE apart. So indices lie between 1 and
    `(batch * length - 1) // SIZE`, and no two boundaries share one.
    """
    return token // SIZE


@triton.jit
def locate_sequence(table, sequence, length, tiles, PACKED: tl.constexpr):
    """Return the first tile of a sequence, its first token in the flattened batch (int64), and its tokens."""
    if PACKED:
        at = table + sequence * 3
        tile, token, count = tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.int32)
    else:
        tile, token, count = sequence * tiles, sequence * length, length
    return tile, token, count


@triton.jit
def load_rows(base, stride, count, column, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Load rows `[SIZE, columns]`; zeros from row `count` and from column `WIDTH` on."""
    t = tl.arange(0, SIZE)
    return tl.load(
        base + t[:, None] * stride + column[None, :], mask=(t < count)[:, None] & (column < WIDTH)[None, :], other=0.0
    )


@triton.jit
def load_rows_transposed(base, stride, count, column, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Load the rows of `load_rows` as `[columns, SIZE]`."""
    t = tl.arange(0, SIZE)
    return tl.load(
        base + t[None, :] * stride + column[:, None], mask=(t < count)[None, :] & (column < WIDTH)[:, None], other=0.0
    )


@triton.jit
def store_rows(base, stride, count, column, x, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    t = tl.arange(0, SIZE)
    mask = (t < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(base + t[:, None] * stride + column[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_state(base, key, value, K: tl.constexpr, V: tl.constexpr, stored=None):
    """Load a block `[keys, values]` of a contiguous matrix `[K, V]`; zeros unless `stored`, if it is given."""
    inside = (key < K)[:, None] & (value < V)[None, :]
    if stored is not None:
        inside = inside & stored
    return tl.load(base + key[:, None] * V + value[None, :], mask=inside, other=0.0)


@triton.jit
def store_state(base, key, value, x, K: tl.constexpr, V: tl.constexpr, stored=None):
    """Store a block of a contiguous matrix `[K, V]`; nothing unless `stored`, if it is given."""
    inside = (key < K)[:, None] & (value < V)[None, :]
    if stored is not None:
        inside = inside & stored
    tl.store(base + key[:, None] * V + value[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_state_transposed(base, key, value, K: tl.constexpr, V: tl.constexpr, stored=None):
    """Load the block of `load_state` as `[values, keys]`."""
    inside = (value < V)[:, None] & (key < K)[None, :]
    if stored is not None:
        inside = inside & stored
    return tl.load(base + key[None, :] * V + value[:, None], mask=inside, other=0.0)


@triton.jit
def load_per_token(base, count, stride, SIZE: tl.constexpr):
    """Load one number per token as float32 `[SIZE]`; zeros from token `count` on."""
    t = tl.arange(0, SIZE)
    return tl.load(base + t * stride, mask=t < count, other=0.0).to(tl.float32)


def dot_precision(dtype: torch.dtype) -> str:
    """Return the `PRECISION` of `matmul`: full for float32, tensor cores otherwise; always full in the interpreter."""
    if knobs.runtime.interpret:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr, acc=None):
    """Compute a b, or acc + a b."""
    if PRECISION == "ieee":  # Triton's interpreter treats bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
