"""An adaptive filter from its parts: tokens are laid out in lanes, turned back to where nothing turns, and averaged."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.kernels.attend.dynamics import Dynamics, Weighing, turned, turns
from kalmix.kernels.attend.lanes import lay_out
from kalmix.kernels.attend.scores import numbers_of, rules_of
from kalmix.segments import Segments
from kalmix.types import Filtered

# (q, k, v, times, rank, numbers, rules, variance) -> what was read, as `v`, and log of the precision `[L, T, H]`
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
    dtype, tokens, heads = lanes.k.dtype, q.shape[1], k.shape[2]
    turn = turns(lanes.times, keys.frequency, dtype)
    query = turned(lanes.q, _last(turn, tokens), forward=False)
    key = turned(lanes.k, turn, forward=False)
    if values is not None:
        turn = turns(lanes.times, values.frequency, dtype)
    turn = tuple(x[..., None, :] for x in turn)  # the same for all value heads of a key head
    value = turned(lanes.v.unflatten(2, (heads, -1)), turn, forward=False)
    numbers, rules = numbers_of(keys, values, weighing, dtype), rules_of(values, weighing)
    read, log_precision = core(query, key, value.flatten(3), lanes.times, lanes.rank, numbers, rules, variance)
    mean = turned(read.unflatten(3, value.shape[3:]), _last(turn, tokens), forward=True).flatten(2, 3)
    spread = None
    if log_precision is not None:
        spread = lanes.paste((-log_precision).exp().repeat_interleave(v.shape[2] // heads, 2)[..., None])
    return Filtered(lanes.paste(mean).to(v.dtype), spread, lanes.after if rules.causal else None)


def _last(turn: tuple[Tensor, ...], tokens: int) -> tuple[Tensor, ...]:
    return tuple(x[:, x.shape[1] - tokens :] for x in turn)
