"""Filtering step by step, whatever the op: the loop of every `reference` kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kalmix.segments import Segments

Reads = tuple[Tensor, ...]


def walk(
    step: Callable[..., tuple[Reads, Any]], belief: Any, tokens: Iterable[tuple[Any, ...]], owner: Tensor | None
) -> tuple[list[Tensor], Any]:
    """`step(belief, *token) -> (reads, belief)` over tokens of a batch, each a tuple of `[B, ...]`.

    `owner` `[B, T]` says which sequence a token belongs to (-1: none), if beliefs are not one a batch row. Returns the
    reads stacked over time, 0 at tokens of no sequence, and the belief after the last token. Nothing is overwritten.
    """
    reads = []
    for t, token in enumerate(tokens):
        now = belief if owner is None else belief.take(owner[:, t].clamp(min=0))
        read, posterior = step(now, *token)
        reads.append(read)
        belief = posterior if owner is None else _put(belief, posterior, owner[:, t])
    stacked = [torch.stack(read, 1) for read in zip(*reads, strict=True)]
    if owner is not None:
        stacked = [torch.where((owner >= 0)[..., None, None], read, 0) for read in stacked]
    return stacked, belief


def owners(segments: Segments | None, batch: int, length: int) -> Tensor | None:
    return None if segments is None else segments.owner(batch, length)


def inside(owner: Tensor | None, *signals: Any, absent: float = 0.0) -> tuple[Any, ...]:
    """Return signals `[B, T, ...]` (or `None`) with `absent` for tokens of no sequence, whose gradient is 0."""
    if owner is None:
        return signals
    here = owner >= 0
    shapes = [() if x is None else (*here.shape, *[1] * (x.ndim - 2)) for x in signals]
    pairs = zip(signals, shapes, strict=True)
    return tuple(x if x is None else torch.where(here.view(shape), x, absent) for x, shape in pairs)


def _put(belief: Any, posterior: Any, owner: Tensor) -> Any:
    """Each sequence takes the posterior of the batch row that serves it now, if one does."""
    serves = owner == torch.arange(belief[0].shape[0], device=owner.device)[:, None]  # [N, B]
    served, row = serves.any(1)[:, None, None, None], serves.int().argmax(1)
    return type(belief)(*(torch.where(served, new[row], old) for old, new in zip(belief, posterior, strict=True)))
