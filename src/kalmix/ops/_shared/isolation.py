"""Keep NaN and infinity in the sequence, and from the token on, where they come in.

Matrix products over a chunk multiply what later tokens wrote by 0 for earlier ones, and 0 times NaN is NaN. Kernels
made of such products filter finite values only; NaN is added to the results afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.segments import Segments
from kalmix.types import Filtered


def isolate(
    function: Callable[..., Filtered],
    signals: tuple[Any, ...],
    belief: Any,
    segments: Segments | None,
    absent: tuple[float, ...] | None = None,
) -> Filtered:
    """Call `function(*signals)` with finite values for those that are not, and make NaN of all that depends on them.

    That is what is read from their token on, in value heads that use them, and the belief of their sequence. Tokens
    outside every sequence change nothing. Gradients are those for the finite value.

    On a CPU tokens that are finite pass through. Elsewhere, and while compiling, nothing waits for values.

    Args:
        function: returns a mean `[B, T, G, V]`, perhaps a variance, and a belief of tensors `[N, G, *, *]`.
        signals: `[B, T, H or G, ...]`, or `None`.
        belief, segments: as the kernel takes them.
        absent: the finite value for each signal; 0 if not given.
    """
    given = [x for x in signals if x is not None]
    if given[0].device.type == "cpu" and not torch.compiler.is_compiling() and _finite(given):
        return function(*signals)
    pairs = zip(signals, absent or (0.0,) * len(signals), strict=True)
    found = function(*(x if x is None else torch.where(x.isfinite(), x, value) for x, value in pairs))
    lost = _lost([x.isfinite() for x in given], belief[0].shape[1])
    since, ended = _spread(lost, segments)
    mean, variance = _spoiled(found.mean, since[..., None]), found.variance
    if variance is not None:
        variance = _spoiled(variance, since[..., None])
    after = (_spoiled(x, ended[..., None, None]) for x in found.belief)
    # The compiler of torch 2.11 returns no object whose class it has from another object made while it traces.
    return Filtered(mean, variance, type(belief)(*after))


def _finite(signals: list[Tensor]) -> bool:
    """Whether all values are finite, unless their sum is not: then they count as not finite, too."""
    sums = [x.detach().sum(dtype=torch.float32 if x.element_size() < 4 else None) for x in signals]
    return bool(torch.stack([x.double() for x in sums]).isfinite().all())


def _lost(finite: list[Tensor], heads: int) -> Tensor:
    """Which tokens hold values that are not finite, of value heads: `[B, T, G]`."""
    whole = [x.flatten(3).all(-1) if x.ndim > 3 else x for x in finite]
    whole = [x.repeat_interleave(heads // x.shape[2], 2) for x in whole]
    return torch.stack(whole).logical_not().any(0)


def _spread(lost: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """Which tokens come at or after a lost one of their sequence `[B, T, G]`, and which sequences have one `[N, G]`."""
    batch, length, _heads = lost.shape
    if segments is None:
        return lost.cumsum(1) > 0, lost.any(1)
    segment_ids = segments.segment_ids(batch, length)
    inside = (segment_ids >= 0)[..., None]
    before = pad((lost & inside).flatten(0, 1).cumsum(0), (0, 0, 1, 0))  # how many come before each token of the batch
    row, start, stop = segments.rows.long().unbind(1)
    begin, end = row * length + start, row * length + stop
    first = before[begin][segment_ids.clamp(min=0)]
    return (before[1:].unflatten(0, (batch, length)) > first) & inside, before[end] > before[begin]


def _spoiled(x: Tensor, where: Tensor) -> Tensor:
    return x + torch.zeros_like(where, dtype=x.dtype).masked_fill(where, torch.nan)
