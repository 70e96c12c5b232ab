"""An adaptive filter from its parts: tokens are laid out in lanes, turned back to where nothing turns, and averaged.

Isolation: 0 times NaN is NaN, so a token that is not finite would reach, through products of tiles, queries that do not
see it. So such tokens are set to 0 before all else, and queries that see one, or are one, read NaN. The gradient of
what they read reaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.dynamics import turned
from kalmix.ops._attend.kv_layout import Lanes, lay_out
from kalmix.ops._attend.scores import Rules, rules_of
from kalmix.ops._attend.signals import AttendSignals
from kalmix.segments import Segments
from kalmix.types import Filtered

# (lanes, signals, variance) -> what was read, `[L, T, H, V]`, and its variance if asked for, `[L, T, H, 1]` or one a
# column of a value head; v of the lanes is `[L, S, H, V]`, the value heads of a key head side by side. The gradient of
# frequencies is the core's: see `owed`.
Core = Callable[[Lanes, AttendSignals, bool], tuple[Tensor, Tensor | None]]


def assemble(
    core: Core, signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool
) -> Filtered:
    """`attend` as its kernels have it, given what attends where states only decay."""
    q, k, v, times, keys, values, weighing = signals
    lanes, spoiled = _cleared(lay_out(q, k, v, times, belief, segments, weighing.window), rules_of(values, weighing))
    times = lanes.times
    now, heads, moved = times[:, -q.shape[1] :], k.shape[2], (keys if values is None else values).frequency.detach()
    query, key = (turned(x, t, keys.frequency.detach(), forward=False) for x, t in ((lanes.q, now), (lanes.k, times)))
    value = turned(lanes.v.unflatten(2, (heads, -1)), times, moved, forward=False)
    still = lanes._replace(q=query, k=key, v=value.flatten(3))
    read, spread = core(still, signals, variance)
    mean = turned(read.unflatten(3, value.shape[3:]), now, moved, forward=True).flatten(2, 3)
    mean = mean.masked_fill(spoiled, torch.nan)
    if spread is not None:
        spread = lanes.paste(spread.repeat_interleave(v.shape[2] // heads, 2).masked_fill(spoiled, torch.nan))
    return Filtered(lanes.paste(mean).to(v.dtype), spread, lanes.after if weighing.causal else None)


def _cleared(lanes: Lanes, rules: Rules) -> tuple[Lanes, Tensor]:
    """Set tokens whose squares are not finite to 0; return also which queries see or are one, `[L, T, 1, 1]`."""
    asked = _square(lanes.q).isfinite()
    held = (_square(lanes.k) + _square(lanes.v) + 0 * lanes.times).isfinite()
    q, k, v = (torch.where(y[..., None, None], x, 0) for x, y in ((lanes.q, asked), (lanes.k, held), (lanes.v, held)))
    clean = lanes._replace(q=q, k=k, v=v, times=torch.where(held, lanes.times, 0))
    own = lanes.rank[:, lanes.rank.shape[1] - lanes.q.shape[1] :]
    return clean, (~asked | rules.sees_any(own, lanes.rank, ~held))[..., None, None]


def _square(x: Tensor) -> Tensor:
    """The square of each token, `[L, T]`."""
    return x.detach().square().sum((2, 3))
