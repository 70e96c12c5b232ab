"""An adaptive filter from its parts: tokens are laid out in lanes, turned back to where nothing turns, and averaged."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.kernels.attend.dynamics import Dynamics, Weighing, turned
from kalmix.kernels.attend.lanes import lay_out
from kalmix.segments import Segments
from kalmix.types import Filtered

# (q, k, v, times, rank, keys, values, weighing, variance) -> what was read, `[L, T, H, V]`, and its variance if asked
# for, `[L, T, H, 1]` or one a column of a value head; v is `[L, S, H, V]`, the value heads of a key head side by side.
# The gradient of frequencies is the core's: see `owed`.
Core = Callable[..., tuple[Tensor, Tensor | None]]


def assemble(
    core: Core,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Dynamics,
    values: Dynamics | None,
    weighing: Weighing,
    times: Tensor | None,
    belief: HistoryBelief,
    segments: Segments | None,
    variance: bool,
) -> Filtered:
    """`attend` as its kernels have it, given what attends where states only decay."""
    lanes = lay_out(q, k, v, times, belief, segments, weighing.window)
    times = lanes.times
    now, heads, moved = times[:, -q.shape[1] :], k.shape[2], (keys if values is None else values).frequency.detach()
    query, key = (turned(x, t, keys.frequency.detach(), forward=False) for x, t in ((lanes.q, now), (lanes.k, times)))
    value = turned(lanes.v.unflatten(2, (heads, -1)), times, moved, forward=False)
    read, spread = core(query, key, value.flatten(3), times, lanes.rank, keys, values, weighing, variance)
    mean = turned(read.unflatten(3, value.shape[3:]), now, moved, forward=True).flatten(2, 3)
    if spread is not None:
        spread = lanes.paste(spread.repeat_interleave(v.shape[2] // heads, 2))
    return Filtered(lanes.paste(mean).to(v.dtype), spread, lanes.after if weighing.causal else None)
