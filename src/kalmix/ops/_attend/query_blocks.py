"""Some queries at a time, computed again for gradients: for forms that have no kernels of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kalmix.ops._attend.scores import Rules
from kalmix.ops._shared import batching as blocks
from kalmix.validation import in_transform


def some_at_a_time(
    read: Callable[[slice, slice], tuple[Tensor, ...]], rules: Rules, like: Tensor, slots: int, entries: int
) -> tuple[Tensor, ...]:
    """`read(queries, keys)`, given slices of tokens and of slots, over all tokens of `like` `[L, T, ...]`.

    `entries` is what one query has in the widest tensor that `read` makes; as many go together as there is room for.
    """
    room, tokens = blocks.ROOM if like.device.type == "cpu" else blocks.ROOM_ELSEWHERE, like.shape[1]
    size = max(1, room // entries)
    found = []
    for start in range(0, tokens, size):
        queries = slice(start, min(start + size, tokens))
        keys = slice(*rules.reach(queries, tokens, slots))
        if in_transform():  # which hooks of saved tensors do not know
            found.append(read(queries, keys))
        else:
            found.append(checkpoint(read, queries, keys, use_reentrant=False, preserve_rng_state=False))
    return tuple(torch.cat(x, 1) for x in zip(*found, strict=True))
