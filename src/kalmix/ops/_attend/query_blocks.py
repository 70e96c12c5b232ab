"""Attention over blocks of queries with recomputation in the backward pass, for forms without their own kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._attend.visible_slots import VisibleSlots
from kalmix.ops._shared import batching
from kalmix.validation import in_transform


def map_query_blocks(
    attend_block: Callable[[slice, slice], tuple[Tensor, ...]],
    config: ScoreConfig,
    rank: Tensor,
    tokens: int,
    elements_per_query: int,
) -> tuple[Tensor, ...]:
    """Call `attend_block` on blocks of queries and concatenate the outputs along dim 1.

    Args:
        attend_block: computes outputs from a slice of queries and a slice of slots.
        config: mask of the scores, from which the slots of a block follow.
        rank: ranks of slots, `[R, S]`.
        tokens: number of queries of a row.
        elements_per_query: size of the largest intermediate per query; it limits the number of queries of a block.
    """
    max_elements = batching.MAX_ENTRIES_CPU if rank.device.type == "cpu" else batching.MAX_ENTRIES_GPU
    size = max(1, max_elements // elements_per_query)
    outputs, visible_slots = [], VisibleSlots(config, rank, tokens)
    for start in range(0, tokens, size):
        queries = slice(start, min(start + size, tokens))
        keys = visible_slots.range(queries)
        if in_transform():  # checkpointing does not support transforms
            outputs.append(attend_block(queries, keys))
        else:
            outputs.append(checkpoint(attend_block, queries, keys, use_reentrant=False, preserve_rng_state=False))
    return tuple(torch.cat(x, 1) for x in zip(*outputs, strict=True))
