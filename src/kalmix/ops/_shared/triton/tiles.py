"""How kernels that work in tiles of tokens find their tokens, and read and write rows of them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kalmix.segments import Segments

LOOSE = ["length", "tiles"]  # numbers that must not compile a kernel anew


class Cut(NamedTuple):
    """Sequences cut into tiles, those of a sequence consecutive and in order.

    Attributes:
        size: tokens a tile, at most.
        tiles: tiles a batch row; with segments, tiles in all.
        count: tiles in all.
        sequences: how many sequences there are.
        table: int64 `[count, 2]` (first token in `[B * T]`, tokens), or a placeholder without segments, where
            arithmetic says the same.
        runs: int64 `[N, 3]` (first tile, first token, tokens) of each sequence, or a placeholder.
        packed: whether the tables say it.
    """

    size: int
    tiles: int
    count: int
    sequences: int
    table: Tensor
    runs: Tensor
    packed: bool


def cut_tokens(batch: int, length: int, size: int, segments: Segments | None, placeholder: Tensor) -> Cut:
    """Cut every sequence into tiles of `size` tokens."""
    if segments is None:
        tiles = -(-length // size)
        return Cut(size, tiles, batch * tiles, batch, placeholder, placeholder, False)
    found = segments.tiles(batch, length, size)
    row, start, stop = segments.rows.long().unbind(1)
    pieces = (stop - start + size - 1) // size
    runs = torch.stack([pieces.cumsum(0) - pieces, row * length + start, stop - start], dim=1)
    table = torch.stack([found.token, found.count], dim=1)
    return Cut(size, len(table), len(table), segments.count, table, runs, True)


@lru_cache(maxsize=64)
def cut_stretch(batch: int, length: int, start: int, stop: int, size: int, device: torch.device) -> Cut:
    """Of every row the tokens from `start` to `stop`, as sequences of their own."""
    first, row = torch.arange(start, stop, size), torch.arange(batch) * length
    token, count = torch.broadcast_tensors(row[:, None] + first, (stop - first).clamp(max=size))
    runs = torch.stack([torch.arange(batch) * len(first), row + start, torch.full_like(row, stop - start)], dim=1)
    table = torch.stack([token.flatten(), count.flatten()], dim=1)
    return Cut(size, len(table), len(table), batch, table.to(device), runs.to(device), True)


def rows(x: Tensor) -> Tensor:
    """`x` `[B, T, heads, width]`, copied unless its rows are contiguous and its tokens one stride apart."""
    steady = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if steady else x.contiguous()


@triton.constexpr_function
def levels_of(size):
    """How often a tile halves until its pieces are single tokens."""
    return size.bit_length() - 1


@triton.jit
def place_of(G, PARTS: tl.constexpr):
    """Which tile, head and part of it a program has: what lies side by side in memory is worked on side by side."""
    place = tl.program_id(0)
    return place // (G * PARTS), place // PARTS % G, place % PARTS


@triton.jit
def tile_of(table, index, length, tiles, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """A tile's first token in the batch (int64), and its tokens."""
    if PACKED:
        at = table + index.to(tl.int64) * 2
        token, count = tl.load(at), tl.load(at + 1).to(tl.int32)
    else:
        first = index % tiles * SIZE
        token, count = (index // tiles).to(tl.int64) * length + first, tl.minimum(length - first, SIZE)
    return token, count


@triton.jit
def run_of(runs, sequence, length, tiles, PACKED: tl.constexpr):
    """A sequence's first tile and first token in the batch (int64), and its tokens."""
    if PACKED:
        at = runs + sequence * 3
        tile, token, count = tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.int32)
    else:
        tile, token, count = sequence * tiles, sequence * length, length
    return tile, token, count


@triton.jit
def load_rows(base, stride, count, column, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Rows `[SIZE, columns]`, 0 beyond `count` and beyond `WIDTH`."""
    t = tl.arange(0, SIZE)
    return tl.load(
        base + t[:, None] * stride + column[None, :], mask=(t < count)[:, None] & (column < WIDTH)[None, :], other=0.0
    )


@triton.jit
def load_columns(base, stride, count, column, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The same rows, transposed: `[columns, SIZE]`."""
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
    """A block `[keys, values]` of a contiguous `[K, V]`."""
    inside = (key < K)[:, None] & (value < V)[None, :]
    return tl.load(base + key[:, None] * V + value[None, :], mask=inside, other=0.0)


@triton.jit
def store_state(base, key, value, x, K: tl.constexpr, V: tl.constexpr):
    inside = (key < K)[:, None] & (value < V)[None, :]
    tl.store(base + key[:, None] * V + value[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_state_transposed(base, key, value, K: tl.constexpr, V: tl.constexpr):
    """The same block, `[values, keys]`."""
    inside = (value < V)[:, None] & (key < K)[None, :]
    return tl.load(base + key[None, :] * V + value[:, None], mask=inside, other=0.0)


@triton.jit
def load_per_token(base, count, stride, SIZE: tl.constexpr):
    """One number a token, float32 `[SIZE]`, 0 beyond `count`."""
    t = tl.arange(0, SIZE)
    return tl.load(base + t * stride, mask=t < count, other=0.0).to(tl.float32)


def precision(dtype: torch.dtype) -> str:
    """How products are taken: of float32 in full, of halves by tensor cores; in the interpreter always in float32."""
    if knobs.runtime.interpret:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def product(a, b, PRECISION: tl.constexpr, onto=None):
    """a b, added to `onto` if there is one."""
    if PRECISION == "ieee":  # Triton's interpreter takes bfloat16 for integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, onto, input_precision=PRECISION)
