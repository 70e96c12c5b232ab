"""Loop over the tokens of a batch, for every op's `reference` kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kalmix.segments import Segments

Readouts = tuple[Tensor, ...]


def run_steps(
    step: Callable[..., tuple[Readouts, Any]],
    belief: Any,
    tokens: Iterable[tuple[Any, ...]],
    segment_ids: Tensor | None,
) -> tuple[list[Tensor], Any]:
    """Filter a batch token by token, without in-place operations, so that autograd differentiates every step.

    Args:
        step: function `step(belief, *token)` that returns a tuple of read-outs `[B, *, *]` and the updated belief.
        belief: prior, a `NamedTuple` of tensors `[N, *, *, *]`, one row per sequence, with a method `take`.
        tokens: one tuple of tensors `[B, ...]` per token, in order of time.
        segment_ids: `[B, T]`, the sequence of each token, -1 for tokens outside every sequence. `None` if N = B and
            batch row b is sequence b.

    Returns:
        The read-outs stacked over time, `[B, T, *, *]`, 0 at tokens outside every sequence, and the final belief.

    Example:
        Sum the tokens of each sequence:

        >>> from kalmix import PointBelief
        >>> from kalmix.ops import run_steps
        >>> def add(belief, token):
        ...     total = belief.mean + token[:, None, None, None]
        ...     return (total[:, 0],), PointBelief(total)
        >>> x = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])  # 2 sequences of 3 tokens
        >>> (sums,), final = run_steps(add, PointBelief(torch.zeros(2, 1, 1, 1)), zip(x.unbind(1)), None)
        >>> sums[..., 0, 0].tolist(), final.mean.flatten().tolist()
        ([[1.0, 3.0, 6.0], [1.0, 2.0, 3.0]], [6.0, 3.0])
    """
    readouts = []
    for t, token in enumerate(tokens):
        current = belief if segment_ids is None else belief.take(segment_ids[:, t].clamp(min=0))
        readout, posterior = step(current, *token)
        readouts.append(readout)
        belief = posterior if segment_ids is None else _update_rows(belief, posterior, segment_ids[:, t])
    stacked = [torch.stack(x, 1) for x in zip(*readouts, strict=True)]
    if segment_ids is not None:
        stacked = [torch.where((segment_ids >= 0)[..., None, None], x, 0) for x in stacked]
    return stacked, belief


def optional_segment_ids(segments: Segments | None, batch: int, length: int) -> Tensor | None:
    """Return the sequence of each token `[B, T]` (-1 for none), or `None` without segments."""
    return None if segments is None else segments.segment_ids(batch, length)


def fill_outside(segment_ids: Tensor | None, *signals: Any, fill: float = 0.0) -> tuple[Any, ...]:
    """Replace signals by `fill` at tokens outside every sequence, which then have zero gradient.

    Args:
        segment_ids: as in `run_steps`; if `None`, signals are returned unchanged.
        signals: `[B, T, ...]`, or `None`.
        fill: value at those tokens.
    """
    if segment_ids is None:
        return signals
    inside = segment_ids >= 0
    shapes = [() if x is None else (*inside.shape, *[1] * (x.ndim - 2)) for x in signals]
    pairs = zip(signals, shapes, strict=True)
    return tuple(x if x is None else torch.where(inside.view(shape), x, fill) for x, shape in pairs)


def _update_rows(belief: Any, posterior: Any, segment_ids: Tensor) -> Any:
    """Replace the belief of each sequence that has a token in this step `[B]` by the posterior of its batch row."""
    matches = segment_ids == torch.arange(belief[0].shape[0], device=segment_ids.device)[:, None]  # [N, B]
    active, row = matches.any(1)[:, None, None, None], matches.int().argmax(1)
    return type(belief)(*(torch.where(active, new[row], old) for old, new in zip(belief, posterior, strict=True)))
