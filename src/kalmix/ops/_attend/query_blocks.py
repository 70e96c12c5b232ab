"""Attention over blocks of queries with recomputation in the backward pass, for forms without their own kernels."""

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
    """Call `attend_block` on blocks of queries and concatenate the outputs along dim 1.

    Args:
        attend_block: computes outputs from a slice of queries and a slice of slots.
        config: mask of the scores, from which the slots of a block follow.
        like: tensor `[R, T, ...]` with one entry per query.
        num_slots: number of slots of keys.
        elements_per_query: size of the largest intermediate per query; it limits the number of queries of a block.
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
        if in_transform():  # checkpointing does not support transforms
            outputs.append(attend_block(queries, keys))
        else:
            outputs.append(checkpoint(attend_block, queries, keys, use_reentrant=False, preserve_rng_state=False))
    return tuple(torch.cat(x, 1) for x in zip(*outputs, strict=True))
