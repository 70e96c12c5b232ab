"""Division of long sequences into slices, so that the working set fits a CPU cache or the memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmix.segments import Segments
from kalmix.types import Filtered

MAX_ENTRIES_CPU = 1 << 19  # entries of one tensor of a slice; a few such tensors fit the cache
MAX_ENTRIES_GPU = 1 << 25  # the same on other devices: enough to keep a GPU busy
MIN_CHUNKS = 4  # smaller slices have one chunk, which needs no scan over chunks
CHUNKS_PER_SEGMENT = 4  # minimum per slice, since each packed sequence may add a partial chunk


def filter_in_slices(
    function: Callable[..., tuple[Tensor, ...]],
    tokens: tuple[Any, ...],
    belief: Any,
    segments: Segments | None,
    entries: int,
    chunk: int,
) -> Filtered:
    """Filter a batch slice by slice along time; the final belief of a slice is the prior of the next.

    `torch.compile` traces a single slice.

    Args:
        function: filters one slice. Takes `tokens`, the tensors of a belief, and the rows of `Segments` or `None`;
            returns the mean `[B, T, G, V]`, optionally the variance, and the tensors of the final belief.
        tokens: signals `[B, T, ...]`; all but the first may be `None`.
        belief, segments: as every kernel takes them.
        entries: entries that one chunk of one batch row has in the largest intermediate tensor.
        chunk: tokens per chunk; slices are multiples of it.
    """
    rows = None if segments is None else segments.rows
    batch, length = tokens[0].shape[:2]
    max_entries = MAX_ENTRIES_CPU if tokens[0].device.type == "cpu" else MAX_ENTRIES_GPU
    chunks = max_entries // (batch * entries)
    if rows is not None:
        chunks = max(chunks, CHUNKS_PER_SEGMENT * -(-rows.shape[0] // batch))
    size = length if torch.compiler.is_compiling() else chunk * (chunks if chunks >= MIN_CHUNKS else 1)
    starts = range(0, length, size)
    slices = ([x] * len(starts) if x is None or length <= size else x.split(size, 1) for x in tokens)
    state, readouts = tuple(belief), []
    for start, *inputs in zip(starts, *slices, strict=True):
        result = function(*inputs, *state, None if rows is None else _clip_rows(rows, start, start + size))
        readouts.append(result[: -len(state)])
        state = result[-len(state) :]
    mean, *variance = (torch.cat(x, 1) if len(starts) > 1 else x[0] for x in zip(*readouts, strict=True))
    return Filtered(mean, variance[0] if variance else None, type(belief)(*state))


def _clip_rows(rows: Tensor, start: int, stop: int) -> Tensor:
    """Restrict the rows of `Segments` to the tokens from `start` to `stop`; token indices count from `start`."""
    return torch.cat([rows[:, :1], rows[:, 1:].clamp(start, stop) - start], 1)
