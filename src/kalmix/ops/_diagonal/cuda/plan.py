"""Tiles, blocks and constants of the CUDA kernels of `diagonal`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kalmix.ops._diagonal.scratch import CHUNK, padded_slots
from kalmix.ops._shared.gpu import num_multiprocessors
from kalmix.segments import Segments

WARPS = 8  # per block
TOKENS = 8  # tokens whose beliefs `backward.cu` holds in registers
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by their numbers in the kernels


@cache
def backward_tile_size(length: int, blocks: int, multiprocessors: int) -> int:
    """Return the tokens per tile of the backward pass.

    A multiprocessor runs one block of `backward.cu` at a time. With several tiles per sequence, other kernels must
    first compute the maps of the tiles. So there is one tile per sequence, unless this leaves too much of the GPU idle.

    Args:
        length: tokens per sequence.
        blocks: blocks for one tile of every sequence.
        multiprocessors: multiprocessors of the GPU.
    """
    chunks = -(-length // CHUNK)

    def cost(tiles: int) -> float:
        """Return the time of the backward pass, in times of one block for one chunk."""
        # The maps of a chunk take about half as long as its gradients.
        maps = 0.5 * chunks * blocks / multiprocessors if tiles > 1 else 0.0
        return -(-tiles * blocks // multiprocessors) * -(-chunks // tiles) + maps

    return CHUNK * -(-chunks // min(range(1, max(2, chunks // 2 + 1)), key=cost))


def tile_size(v: Tensor, slots: int) -> int:
    """Return `backward_tile_size` for values `[B, T, G, V]` and K slots."""
    batch, length, heads, channels = v.shape
    return backward_tile_size(length, batch * heads * num_splits(channels, slots), num_multiprocessors(v.device))


def num_splits(channels: int, slots: int) -> int:
    """Return the number of blocks among which `backward.cu` divides the channels; each stores sums for dq and dk.

    It is at most V / K, rounded up, which bounds the memory for these sums.
    """
    return min(-(-channels // block_channels(slots)), -(-channels // slots))


def block_channels(slots: int) -> int:
    """Return the channels per block, for K slots: a lane holds 4 cells."""
    return WARPS * 128 // padded_slots(slots)


def group_tokens(slots: int) -> int:
    """Return the tokens that `backward.cu` differentiates at once, for K slots: as shared memory permits."""
    return min(TOKENS, 512 // padded_slots(slots))


def constants(signals: dict[str, Tensor], segments: Segments | None) -> dict[str, int]:
    """Return the constants that both kernels take.

    Args:
        signals: signals by the names of the constants with their strides between tokens.
        segments: assignment of tokens to sequences, or `None`.
    """
    q, v, precision = signals["Q_TOKEN"], signals["V_TOKEN"], signals["P_TOKEN"]
    slots, (heads, channels) = q.shape[3], v.shape[2:]
    types = {name: DTYPES.index(x.dtype) for name, x in (("Q_TYPE", q), ("V_TYPE", v), ("W_TYPE", precision))}
    sizes = {"K": slots, "P": padded_slots(slots), "V": channels, "G": heads, "CHUNK": CHUNK, "WARPS": WARPS}
    strides = {name: x.stride(1) for name, x in signals.items()}
    return {**sizes, **types, **strides, "PACKED": segments is not None}
