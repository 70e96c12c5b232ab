"""Some queries at a time, computed again for gradients: for forms that have no kernels of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._shared import batching
from kalmix.validation import in_transform


def map_query_blocks(
    attend_block: Callable[[slice, slice], tuple[Tensor, ...]],
    config: ScoreConfig,
    like: Tensor,
    num_slots: int,
    elements_per_query: int,
) -> tuple[Tensor, ...]:
    """`read(queries, keys)`, given slices of tokens and of slots, over all tokens of `like` `[L, T, ...]`.

    `entries` is what one query has in the widest tensor that `read` makes; as many go together as there is room for.
    """
    max_elements, tokens = (
        batching.MAX_ENTRIES_CPU if like.device.type == "cpu" else batching.MAX_ENTRIES_GPU,
        like.shape[1],
    )
    size = max(1, max_elements // elements_per_query)
    outputs = []
    for start in range(0, tokens, size):
        queries = slice(start, min(start + size, tokens))
        keys = slice(*config.slot_range(queries, tokens, num_slots))
        if in_transform():  # which hooks of saved tensors do not know
            outputs.append(attend_block(queries, keys))
        else:
            outputs.append(checkpoint(attend_block, queries, keys, use_reentrant=False, preserve_rng_state=False))
    return tuple(torch.cat(x, 1) for x in zip(*outputs, strict=True))
