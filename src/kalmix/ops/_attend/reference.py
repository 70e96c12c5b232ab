"""`attend`, written out: all queries against all keys at once, for tests and for float64. Memory O(T^2)."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.assembly import assemble
from kalmix.ops._attend.dynamics import owed, quarter
from kalmix.ops._attend.kv_layout import Lanes
from kalmix.ops._attend.scores import Model, Scores, numbers_of, rules_of, variance_of
from kalmix.ops._attend.signals import AttendSignals
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Adaptive Filter Attention, any autograd. See `kalmix.ops.attend`."""
    return assemble(_attend, signals, belief, segments, variance)


def _attend(lanes: Lanes, signals: AttendSignals, variance: bool) -> tuple[Tensor, Tensor | None]:
    (q, k, v, times, rank, *_), (*_, keys, values, weighing) = lanes, signals
    tokens, rules = q.shape[1], rules_of(values, weighing)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lag = (times[:, -tokens:, None] - times[:, None]).to(q.dtype)[:, None]
    squares = q.square().sum(-1)[..., None], k.square().sum(-1)[..., None, :]
    gram, slip = q @ k.mT, owed(keys.frequency, q.dtype)
    if slip is not None:
        gram = gram + lag * ((slip * q) @ quarter(k).mT) - lag.square() / 2 * ((slip.square() * q) @ k.mT)
    scores = Scores.of(Model.of(numbers_of(keys, values, weighing, q.dtype)), rules, lag, gram, *squares)
    hidden = ~rules.sees(rank[:, -tokens:], rank)
    weights = scores.score.masked_fill(hidden, -torch.inf).log_softmax(-1) + scores.log_reach
    read, own = weights.exp() @ v, owed((keys if values is None else values).frequency, q.dtype)
    if own is not None:
        turning = quarter(v.unflatten(-1, (-1, own.shape[-1]))).flatten(-2)  # of each value head
        own, weighed = own.repeat(1, 1, v.shape[-1] // own.shape[-1]), weights.exp() * lag
        read = read + own * (weighed @ turning) - own.square() / 2 * ((weighed * lag) @ v)
    read = read.transpose(1, 2)
    if not variance:
        return read, None
    log_precision = scores.log_precision().masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True)
    return read, variance_of(log_precision).transpose(1, 2)
