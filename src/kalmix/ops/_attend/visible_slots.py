"""Ranges of keys that blocks of queries attend to, so that packed sequences do not visit each other's keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.ops._attend.kv_layout import EMPTY_RANK
from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._shared.batching import reads_lengths
from kalmix.validation import in_transform

KEY_BLOCK = 16  # queries skip whole blocks of keys


class VisibleSlots:
    """Ranges of slots for blocks of queries.

    Where ranks may be read, a range has the keys that some of the queries attend to; else it follows from the mask.
    """

    def __init__(self, config: ScoreConfig, rank: Tensor, tokens: int) -> None:
        """Prepare the ranges.

        Args:
            config: the mask.
            rank: ranks of slots, `[R, S]`.
            tokens: number of queries of a row, which are in its last slots.
        """
        self.config, self.rank, self.tokens = config, rank, tokens
        self.reads_ranks = reads_lengths(rank) and not torch.compiler.is_compiling() and not in_transform()
        if self.reads_ranks:
            blocks = pad(rank, (0, -rank.shape[1] % KEY_BLOCK), value=EMPTY_RANK).unflatten(1, (-1, KEY_BLOCK))
            self.highest = blocks.amax(2)
            self.lowest = torch.where(blocks > EMPTY_RANK, blocks, self.highest[..., None]).amin(2)

    def query_slots(self, queries: slice) -> slice:
        """Return the slots of queries."""
        past_length = self.rank.shape[1] - self.tokens
        return slice(past_length + queries.start, past_length + queries.stop)

    def range(self, queries: slice) -> slice:
        """Return the slots of keys that some of the queries may attend to."""
        start, stop = self.config.slot_range(queries, self.tokens, self.rank.shape[1])
        if not self.reads_ranks:
            return slice(start, stop)
        own = self.query_slots(queries)
        seen = self._visible_blocks(self.rank[:, own]).nonzero()[:, 0].tolist()
        first, last = (seen[0] * KEY_BLOCK, (seen[-1] + 1) * KEY_BLOCK) if seen else (stop, start)
        # Empty slots attend to each other, so that no sum of weights is 0.
        return slice(max(start, min(first, own.start)), min(stop, max(last, own.stop)))

    def _visible_blocks(self, query_rank: Tensor) -> Tensor:
        """Return which blocks of keys some of the queries `[R, t]` may attend to. Empty slots do not count."""
        occupied = query_rank > EMPTY_RANK
        last = torch.where(occupied, query_rank, EMPTY_RANK).amax(1, keepdim=True)
        first = torch.where(occupied, query_rank, last).amin(1, keepdim=True)
        future = 0 if self.config.causal else self.config.window - 1
        visible = (last + future >= self.lowest) & (first - self.config.window < self.highest)
        return (visible & (last > EMPTY_RANK)).any(0)
