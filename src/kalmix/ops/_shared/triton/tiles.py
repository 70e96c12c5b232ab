"""Tiles of tokens for Triton kernels: their location in the batch, and loads and stores of their rows."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kalmix.segments import Segments

UNSPECIALIZED = ["length", "tiles"]  # integer arguments whose values must not cause a new compilation


class Tiling(NamedTuple):
    """Division of sequences into tiles; the tiles of a sequence are consecutive and in order.

    Attributes:
        size: largest number of tokens per tile.
        tiles: tiles per batch row; with segments, tiles in total.
        num_tiles: tiles in total.
        num_sequences: number of sequences, N.
        tile_table: int64 `[num_tiles, 2]` (first token in the flattened batch, number of tokens); a placeholder without
            segments, where kernels compute these numbers.
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
    found = segments.tiles(batch, length, size)
    row, start, stop = segments.rows.long().unbind(1)
    counts = (stop - start + size - 1) // size
    sequence_table = torch.stack([counts.cumsum(0) - counts, row * length + start, stop - start], dim=1)
    tile_table = torch.stack([found.token, found.count], dim=1)
    return Tiling(size, len(tile_table), len(tile_table), segments.count, tile_table, sequence_table, True)


@lru_cache(maxsize=64)
def tile_interval(batch: int, length: int, start: int, stop: int, size: int, device: torch.device) -> Tiling:
    """Divide the tokens from `start` to `stop` of every batch row into tiles, as if they were sequences."""
    first, row = torch.arange(start, stop, size), torch.arange(batch) * length
    token, count = torch.broadcast_tensors(row[:, None] + first, (stop - first).clamp(max=size))
    sequence_table = torch.stack(
        [torch.arange(batch) * len(first), row + start, torch.full_like(row, stop - start)], dim=1
    )
    tile_table = torch.stack([token.flatten(), count.flatten()], dim=1)
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
        at = table + index.to(tl.int64) * 2
        token, count = tl.load(at), tl.load(at + 1).to(tl.int32)
    else:
        first = index % tiles * SIZE
        token, count = (index // tiles).to(tl.int64) * length + first, tl.minimum(length - first, SIZE)
    return token, count


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
def load_state(base, key, value, K: tl.constexpr, V: tl.constexpr):
    """Load a block `[keys, values]` of a contiguous matrix `[K, V]`."""
    inside = (key < K)[:, None] & (value < V)[None, :]
    return tl.load(base + key[:, None] * V + value[None, :], mask=inside, other=0.0)


@triton.jit
def store_state(base, key, value, x, K: tl.constexpr, V: tl.constexpr):
    inside = (key < K)[:, None] & (value < V)[None, :]
    tl.store(base + key[:, None] * V + value[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_state_transposed(base, key, value, K: tl.constexpr, V: tl.constexpr):
    """Load the block of `load_state` as `[values, keys]`."""
    inside = (value < V)[:, None] & (key < K)[None, :]
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
