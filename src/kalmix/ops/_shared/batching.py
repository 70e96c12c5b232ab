"""Long sequences block after block, so that what is worked on at once fits a cache, or a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmix.segments import Segments
from kalmix.types import Filtered

ROOM = 1 << 19  # entries of one signal worked on at once on a CPU: a few such tensors fit the cache
ROOM_ELSEWHERE = 1 << 25  # elsewhere: enough to keep a GPU busy
FEW = 4  # chunks that a block should have, or it has one alone, which nothing needs to be carried to
RUNS = 4  # chunks a block should have for every run, as each run costs every block one chunk


def in_blocks(
    function: Callable[..., tuple[Tensor, ...]],
    tokens: tuple[Any, ...],
    belief: Any,
    segments: Segments | None,
    entries: int,
    chunk: int,
) -> Filtered:
    """Filter block after block, each continuing from the belief that the one before left.

    Args:
        function: takes `tokens`, the tensors of a belief, and the rows of `Segments` or `None`; returns the mean
            `[B, T, G, V]`, perhaps the variance, and the tensors of the belief after.
        tokens: signals `[B, T, ...]`, of which all but the first may be `None`.
        belief, segments: as the kernel takes them.
        entries: what a chunk has in the widest of the tensors that are worked on at once.
        chunk: tokens that the kernel works on as one, of which blocks are multiples.

    A compiler sees a single block.
    """
    rows = None if segments is None else segments.rows
    batch, length = tokens[0].shape[:2]
    room = ROOM if tokens[0].device.type == "cpu" else ROOM_ELSEWHERE
    fit = room // (batch * entries)
    if rows is not None:
        fit = max(fit, RUNS * -(-rows.shape[0] // batch))
    size = length if torch.compiler.is_compiling() else chunk * (fit if fit >= FEW else 1)
    starts = range(0, length, size)
    cuts = ([x] * len(starts) if x is None or length <= size else x.split(size, 1) for x in tokens)
    after, reads = tuple(belief), []
    for start, *block in zip(starts, *cuts, strict=True):
        result = function(*block, *after, None if rows is None else _within(rows, start, start + size))
        reads.append(result[: -len(after)])
        after = result[-len(after) :]
    mean, *variance = (torch.cat(x, 1) if len(starts) > 1 else x[0] for x in zip(*reads, strict=True))
    return Filtered(mean, variance[0] if variance else None, type(belief)(*after))


def _within(rows: Tensor, start: int, stop: int) -> Tensor:
    """The part of every run between two tokens, counted from the first of these."""
    return torch.cat([rows[:, :1], rows[:, 1:].clamp(start, stop) - start], 1)
