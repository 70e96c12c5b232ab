"""Long sequences block after block, so that what is worked on at once fits a cache, or a GPU's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.segments import Segments
from kalmix.types import Filtered

ROOM = 1 << 19  # entries of one signal worked on at once on a CPU: a few such tensors fit the cache
ROOM_ELSEWHERE = 1 << 25  # elsewhere: enough to keep a GPU busy
RUNS = 4  # chunks a block should have for every run, as each run costs every block one chunk


def in_blocks(
    function: type[torch.autograd.Function],
    tokens: tuple[Any, ...],
    belief: Any,
    segments: Segments | None,
    width: int,
    chunk: int,
) -> Filtered:
    """Filter block after block, each continuing from the belief that the one before left.

    Args:
        function: takes `tokens`, the tensors of a belief, and the rows of `Segments` or `None`; returns the mean
            `[B, T, G, V]` and the tensors of the belief after.
        tokens: signals `[B, T, ...]`, of which all but the first may be `None`.
        belief, segments: as the kernel takes them.
        width: entries that the widest signal has for a token.
        chunk: tokens that the kernel works on as one, of which blocks are multiples.

    A compiler sees a single block.
    """
    rows = None if segments is None else segments.rows
    batch, length = tokens[0].shape[:2]
    room = ROOM if tokens[0].device.type == "cpu" else ROOM_ELSEWHERE
    size = chunk * max(room // (batch * width * chunk), RUNS * (1 if rows is None else rows.shape[0]))
    if length <= size or torch.compiler.is_compiling():
        mean, *after = function.apply(*tokens, *belief, rows)
        return Filtered(mean, None, type(belief)(*after))
    starts = range(0, length, size)
    blocks = zip(*([None] * len(starts) if x is None else x.split(size, 1) for x in tokens), strict=True)
    means, after = [], list(belief)
    for start, block in zip(starts, blocks, strict=True):
        mean, *after = function.apply(*block, *after, None if rows is None else _within(rows, start, start + size))
        means.append(mean)
    return Filtered(torch.cat(means, 1), None, type(belief)(*after))


def _within(rows: Tensor, start: int, stop: int) -> Tensor:
    """The part of every run between two tokens, counted from the first of these."""
    return torch.cat([rows[:, :1], rows[:, 1:].clamp(start, stop) - start], 1)
