"""Containment of NaN and infinity: they affect only their own sequence, and no earlier token.

A matrix product over a chunk multiplies later values by 0 when it computes earlier results, and 0 times NaN is NaN.
Kernels made of such products therefore filter finite values only, and NaN is added to the results afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.segments import Segments
from kalmix.types import Filtered


def isolate_non_finite(
    function: Callable[..., Filtered],
    signals: tuple[Any, ...],
    belief: Any,
    segments: Segments | None,
    fill: tuple[float, ...] | None = None,
) -> Filtered:
    """Call `function` with NaN and infinity in `signals` replaced, and set all results that depend on them to NaN.

    These are the read-outs from that token on, in the value heads that use it, and the final belief of its sequence.
    Tokens outside every sequence have no effect. Gradients are those at the replaced values.

    On a CPU the replacement is skipped if all values are finite. On other devices and under `torch.compile` it always
    runs, because a test of the values would synchronise or break the graph.

    Args:
        function: returns a mean `[B, T, G, V]`, an optional variance, and a belief of tensors `[N, G, *, *]`.
        signals: arguments of `function`, each `[B, T, H or G, ...]` or `None`.
        belief, segments: as every kernel takes them.
        fill: one replacement value per signal; zeros by default.
    """
    present = [x for x in signals if x is not None]
    if present[0].device.type == "cpu" and not torch.compiler.is_compiling() and _all_finite(present):
        return function(*signals)
    masks = [None if x is None else x.isfinite() for x in signals]
    fills = fill or (0.0,) * len(signals)
    replaced = [x if m is None else torch.where(m, x, value) for x, m, value in zip(signals, masks, fills, strict=True)]
    non_finite = _non_finite_tokens([mask for mask in masks if mask is not None], belief[0].shape[1])
    del masks  # as large as the signals
    result = function(*replaced)
    tokens, sequences = _propagate(non_finite, segments)
    mean, variance = _set_nan(result.mean, tokens[..., None]), result.variance
    if variance is not None:
        variance = _set_nan(variance, tokens[..., None])
    final = (_set_nan(x, sequences[..., None, None]) for x in result.belief)
    # Not `type(result.belief)`: torch 2.11's compiler returns no object whose class it takes from a traced object.
    return Filtered(mean, variance, type(belief)(*final))


def _all_finite(signals: list[Tensor]) -> bool:
    """Return whether all values are finite. Tests sums, so that it may return False if one overflows."""
    sums = [x.detach().sum(dtype=torch.float32 if x.element_size() < 4 else None) for x in signals]
    return bool(torch.stack([x.double() for x in sums]).isfinite().all())


def _non_finite_tokens(finite: list[Tensor], heads: int) -> Tensor:
    """Combine masks of finite values to a mask `[B, T, G]` of tokens with any value that is not."""
    per_head = [x.flatten(3).all(-1) if x.ndim > 3 else x for x in finite]
    per_head = [x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2) for x in per_head]
    return torch.stack(per_head).logical_not().any(0)


def _propagate(non_finite: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """Return which tokens `[B, T, G]` are at or after a marked token of their sequence, and which sequences `[N, G]`
    have a marked token."""
    batch, length, _heads = non_finite.shape
    if segments is None:
        return non_finite.cumsum(1) > 0, non_finite.any(1)
    segment_ids = segments.segment_ids(batch, length)
    inside = (segment_ids >= 0)[..., None]
    marked = (non_finite & inside).flatten(0, 1)
    preceding = pad(marked.cumsum(0), (0, 0, 1, 0))  # marked tokens before each token of the flattened batch
    row, start, stop = segments.rows.long().unbind(1)
    begin, end = row * length + start, row * length + stop
    first = preceding[begin][segment_ids.clamp(min=0)]
    return (preceding[1:].unflatten(0, (batch, length)) > first) & inside, preceding[end] > preceding[begin]


def _set_nan(x: Tensor, where: Tensor) -> Tensor:
    return x + torch.zeros_like(where, dtype=x.dtype).masked_fill(where, torch.nan)
