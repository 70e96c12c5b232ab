"""Filtering step by step, whatever the op: the loop of every `reference` kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kalmix.segments import Segments

Reads = tuple[Tensor, ...]


def walk(
    step: Callable[..., tuple[Reads, Any]], belief: Any, tokens: Iterable[tuple[Any, ...]], segment_ids: Tensor | None
) -> tuple[list[Tensor], Any]:
    """Filter a batch token by token; nothing is overwritten, so that gradients flow through every step.

    Args:
        step: `step(belief, *token)` returns a tuple of reads, `[B, ...]` with two more axes each, and the next belief.
        belief: a `NamedTuple` of tensors `[N, ...]` with four axes and a method `take`; one row a sequence.
        tokens: one tuple of `[B, ...]` a token, in order of time.
        segment_ids: `[B, T]`, the sequence that each token belongs to, -1 for none; `None` where N = B and row b of the
            belief is that of batch row b.

    Returns:
        The reads stacked over time, `[B, T, ...]`, 0 at tokens of no sequence, and the belief after the last token.
    """
    reads = []
    for t, token in enumerate(tokens):
        now = belief if segment_ids is None else belief.take(segment_ids[:, t].clamp(min=0))
        read, posterior = step(now, *token)
        reads.append(read)
        belief = posterior if segment_ids is None else _put(belief, posterior, segment_ids[:, t])
    stacked = [torch.stack(read, 1) for read in zip(*reads, strict=True)]
    if segment_ids is not None:
        stacked = [torch.where((segment_ids >= 0)[..., None, None], read, 0) for read in stacked]
    return stacked, belief


def segment_ids_of(segments: Segments | None, batch: int, length: int) -> Tensor | None:
    return None if segments is None else segments.segment_ids(batch, length)


def inside(segment_ids: Tensor | None, *signals: Any, absent: float = 0.0) -> tuple[Any, ...]:
    """Return signals `[B, T, ...]` (or `None`) with `absent` for tokens of no sequence, whose gradient is 0."""
    if segment_ids is None:
        return signals
    here = segment_ids >= 0
    shapes = [() if x is None else (*here.shape, *[1] * (x.ndim - 2)) for x in signals]
    pairs = zip(signals, shapes, strict=True)
    return tuple(x if x is None else torch.where(here.view(shape), x, absent) for x, shape in pairs)


def _put(belief: Any, posterior: Any, segment_ids: Tensor) -> Any:
    """Each sequence takes the posterior of the batch row that serves it now, if one does."""
    serves = segment_ids == torch.arange(belief[0].shape[0], device=segment_ids.device)[:, None]  # [N, B]
    served, row = serves.any(1)[:, None, None, None], serves.int().argmax(1)
    return type(belief)(*(torch.where(served, new[row], old) for old, new in zip(belief, posterior, strict=True)))
