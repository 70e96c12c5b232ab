"""`attend` in tiles of queries and keys: torch only, and nothing is kept of a pair.

A softmax whose sum is carried from tile to tile, as in flash attention, beside a sum of values that decay; a third
adds up precisions. Backwards, tiles are computed again. Memory O(T).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.assembly import assemble
from kalmix.ops._attend.dynamics import quarter
from kalmix.ops._attend.kv_layout import Lanes
from kalmix.ops._attend.scores import Model, Rules, Scores, numbers_of, rules_of, variance_of
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared import batching as blocks
from kalmix.ops._shared.custom_op import custom_op, register_backward
from kalmix.segments import Segments
from kalmix.types import Filtered

QUERIES = 64  # of a tile


def attend(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Adaptive Filter Attention with a backward of its own. See `kalmix.ops.attend`."""
    return assemble(_core, signals, belief, segments, variance)


def _core(lanes: Lanes, signals: AttendSignals, variance: bool) -> tuple[Tensor, Tensor | None]:
    (q, k, v, times, rank, *_), (*_, keys, values, weighing) = lanes, signals
    numbers, rules = numbers_of(keys, values, weighing, q.dtype), rules_of(values, weighing)
    turning = (x.frequency.to(q.dtype) for x in (keys, keys if values is None else values))
    read, _, log_precision = _attend(q, k, v, times, rank, numbers, *turning, *rules, variance)
    return read, variance_of(log_precision[..., None]) if variance else None


class _Lanes(NamedTuple):
    """What tiles are cut from: `[L, H, T or S, *]`, times and ranks `[L, S]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    times: Tensor
    rank: Tensor
    model: Model
    rules: Rules

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, times: Tensor, rank: Tensor, numbers: Tensor, rules: Rules) -> _Lanes:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return cls(q, k, v, times, rank, Model.of(numbers), rules)

    def queries(self) -> Iterator[slice]:
        return (slice(i, min(i + QUERIES, self.q.shape[2])) for i in range(0, self.q.shape[2], QUERIES))

    def keys_of(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """Tiles of keys, and where queries do not see them; where looking is free, none that they see nothing of."""
        start, stop = self.rules.reach(queries, self.q.shape[2], self.k.shape[2])
        own = self._own(queries)
        room = blocks.ROOM if self.q.device.type == "cpu" else blocks.ROOM_ELSEWHERE
        size = max(QUERIES, room // (self.q.shape[0] * self.q.shape[1] * QUERIES))
        for i in range(start, stop, size):
            keys = slice(i, min(i + size, stop))
            seen = self.rules.sees(self.rank[:, own], self.rank[:, keys])
            if seen.device.type != "cpu" or bool(seen.any()):
                yield keys, ~seen

    def scores(self, queries: slice, keys: slice) -> Scores:
        """The scores of a tile."""
        q, k = self.q[:, :, queries], self.k[:, :, keys]
        lag = (self.times[:, self._own(queries), None] - self.times[:, None, keys]).to(q.dtype)[:, None]
        squares = q.square().sum(-1)[..., None], k.square().sum(-1)[..., None, :]
        return Scores.of(self.model, self.rules, lag, q @ k.mT, *squares)

    def scores_of_pairs(self, key: Tensor, slot: Tensor) -> Scores:
        """The scores of all queries against one key each, `[L, H, T, 1]`, given it and its slot `[L, H, T]`."""
        time = self.times[:, None].expand(-1, slot.shape[1], -1)
        lag = (time[:, :, -slot.shape[2] :] - time.gather(2, slot)).to(self.q.dtype)[..., None]
        squares = (x.square().sum(-1, keepdim=True) for x in (self.q, key))
        return Scores.of(self.model, self.rules, lag, (self.q * key).sum(-1, keepdim=True), *squares)

    def _own(self, queries: slice) -> slice:
        """The slots of queries."""
        past = self.k.shape[2] - self.q.shape[2]
        return slice(past + queries.start, past + queries.stop)


class _Rest(NamedTuple):
    """Rest by which the score gradients of each query miss a sum of 0, and its heaviest key: `[L, H, T]`.

    Attributes:
        lack: minus the sum so far.
        top: the logarithm of the greatest weight so far.
        slot: where its key is.
    """

    lack: Tensor
    top: Tensor
    slot: Tensor

    @classmethod
    def of(cls, lanes: _Lanes) -> _Rest:
        lack = lanes.q.new_zeros(lanes.q.shape[:3])
        return cls(lack, torch.full_like(lack, torch.finfo(lack.dtype).min), lack.long())

    def add(self, queries: slice, keys: slice, to_score: Tensor, log_weight: Tensor) -> None:
        """Add a tile."""
        lack, top, slot = (x[:, :, queries] for x in self)
        lack -= to_score.sum(-1)
        found, at = log_weight.max(-1)
        slot.copy_(torch.where(found > top, at + keys.start, slot))
        torch.maximum(top, found, out=top)

    def pull_back(self, lanes: _Lanes, of_keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, numbers and frequencies of keys through what is lacking."""
        index = self.slot[..., None].expand(-1, -1, -1, lanes.k.shape[3])
        query, key = lanes.q, lanes.k.gather(2, index)
        scores, lack = lanes.scores_of_pairs(key, self.slot), self.lack[..., None]
        to_gram, to_query, to_key, to_numbers = scores.pull_back(
            lack, torch.zeros_like(lack), None, self.top[..., None]
        )
        to_k = torch.zeros_like(lanes.k).scatter_add_(2, index, to_gram * query + 2 * to_key * key)
        to_of_keys = _turning(query, to_gram * scores.lag * key, of_keys)
        return to_gram * key + 2 * to_query * query, to_k, to_numbers, to_of_keys


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    times: Tensor,
    rank: Tensor,
    numbers: Tensor,
    of_keys: Tensor,
    of_values: Tensor,
    shared: bool,
    rational: bool,
    causal: bool,
    window: int,
    variance: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What is read `[L, T, H, V]`, log of the sum of weights and log of the precision, `[L, T, H]`, or `[0]`.

    All has turned already: the frequencies, of keys `[H, C]` and of values `[H, D]`, are here for their gradients.
    """
    lanes = _Lanes.of(q, k, v, times, rank, numbers, Rules(shared, rational, causal, window))
    reads, totals, precisions = [], [], []
    for queries in lanes.queries():
        top = precision = lanes.q.new_full((*lanes.q.shape[:2], queries.stop - queries.start), -torch.inf)
        total, read = torch.zeros_like(top), 0.0
        for keys, hidden in lanes.keys_of(queries):
            scores = lanes.scores(queries, keys)
            score = scores.score.masked_fill(hidden, -torch.inf)
            before, top = top, torch.maximum(top, score.amax(-1))
            known = top.clamp(min=torch.finfo(top.dtype).min)[..., None]  # nothing seen yet is no NaN
            kept = (before[..., None] - known).exp()
            total = total * kept[..., 0] + (score - known).exp().sum(-1)
            read = read * kept + (score - known + scores.log_reach).exp() @ lanes.v[:, :, keys]
            if variance:
                added = scores.log_precision().masked_fill(hidden, -torch.inf).logsumexp(-1)
                precision = torch.logaddexp(precision, added)
        reads.append(read / total[..., None])
        totals.append(top + total.log())
        precisions.append(precision)
    read, total, precision = (torch.cat(x, 2).transpose(1, 2).contiguous() for x in (reads, totals, precisions))
    return read, total, precision if variance else precision.new_empty(0)


def _forward_fake(q, k, v, times, rank, numbers, of_keys, of_values, shared, rational, causal, window, variance):
    one = q.shape[:3]
    return q.new_empty(*one, v.shape[3]), q.new_empty(one), q.new_empty(one if variance else (0,))


def _backward(
    to_read: Tensor,
    to_precision: Tensor,
    read: Tensor,
    total: Tensor,
    precision: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    times: Tensor,
    rank: Tensor,
    numbers: Tensor,
    of_keys: Tensor,
    of_values: Tensor,
    shared: bool,
    rational: bool,
    causal: bool,
    window: int,
    variance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, numbers and frequencies.

    An upstream gradient that is not finite reaches its own query and the frequencies of values, which become NaN.

    Gradients of a query's scores add up to 0. Where one key has nearly all of the weight, its own is what rounding
    leaves of a difference, and large derivatives may multiply it: so what the sum lacks goes to the heavy keys.
    """
    lanes = _Lanes.of(q, k, v, times, rank, numbers, Rules(shared, rational, causal, window))
    broken = ~to_read.isfinite().all(-1) | (~to_precision.isfinite() if variance else False)
    to_read = to_read.masked_fill(broken[..., None], 0)
    to_precision = to_precision.masked_fill(broken, 0) if variance else to_precision
    share = (to_read * read).sum(-1).transpose(1, 2)[..., None]
    to_read, total = to_read.transpose(1, 2), total.transpose(1, 2)[..., None]
    if variance:
        to_precision, precision = (x.transpose(1, 2)[..., None] for x in (to_precision, precision))
    to_q, to_k, to_v = (torch.zeros_like(x) for x in lanes[:3])
    to_numbers, to_of_keys, to_of_values = (torch.zeros_like(x) for x in (numbers, of_keys, of_values))
    rest, several = _Rest.of(lanes), False
    for queries in lanes.queries():
        tiles = list(lanes.keys_of(queries))
        for keys, hidden in tiles:
            scores = lanes.scores(queries, keys)
            query, key, value = lanes.q[:, :, queries], lanes.k[:, :, keys], lanes.v[:, :, keys]
            log_weight = scores.score.masked_fill(hidden, -torch.inf) - total[:, :, queries]
            reached, arrived = (log_weight + scores.log_reach).exp(), to_read[:, :, queries]
            to_v[:, :, keys] += reached.mT @ arrived
            to_reach = reached * (arrived @ value.mT)
            weight = log_weight.exp()
            to_score = to_reach - weight * share[:, :, queries]
            if len(tiles) == 1:
                to_score = torch.addcmul(to_score, weight, to_score.sum(-1, keepdim=True), value=-1)
            else:
                several = True
                rest.add(queries, keys, to_score, log_weight)
            to_log_precision = None
            if variance:
                part = scores.log_precision().masked_fill(hidden, -torch.inf) - precision[:, :, queries]
                to_log_precision = part.exp() * to_precision[:, :, queries]
            to_gram, to_query, to_key, to_own = scores.pull_back(
                to_score, to_reach, to_log_precision, log_weight.masked_fill(hidden, 0)
            )
            to_q[:, :, queries] += to_gram @ key + 2 * to_query.sum(-1)[..., None] * query
            to_k[:, :, keys] += to_gram.mT @ query + 2 * to_key.sum(-2)[..., None] * key
            to_numbers += to_own
            to_of_keys += _turning(query, (to_gram * scores.lag) @ key, of_keys)
            to_of_values += _turning(arrived, (reached * scores.lag) @ value, of_values)
    if several:
        found = rest.pull_back(lanes, of_keys)
        to_q, to_k, to_numbers, to_of_keys = (
            x + y for x, y in zip((to_q, to_k, to_numbers, to_of_keys), found, strict=True)
        )
    to_q, to_k, to_v = (x.transpose(1, 2).contiguous() for x in (to_q, to_k, to_v))
    to_q.masked_fill_(broken[..., None], torch.nan)
    return to_q, to_k, to_v, to_numbers, to_of_keys, to_of_values.masked_fill(broken.any(), torch.nan)


def _turning(x: Tensor, late: Tensor, frequency: Tensor) -> Tensor:
    """The gradient of frequencies `[H, C]` through x'y, where y turns on by its lag; `late` is the sum of lag y."""
    heads, channels = frequency.shape
    x, late = (y.unflatten(-1, (-1, 2 * channels)) for y in (x, late))  # value heads of a key head apart
    return (x * quarter(late)).sum((0, 2, 3)).view(heads, 2, channels).sum(1)


def _backward_fake(to_read, to_precision, read, total, precision, q, k, v, times, rank, *numbers_and_rules):
    given = (q, k, v, *numbers_and_rules[:3])
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.rules = inputs[8:]


def _pull_back(ctx, to_read, _, to_precision):
    read, *_rest = saved = ctx.saved_tensors
    to_read = torch.zeros_like(read) if to_read is None else to_read
    to_precision = torch.zeros_like(saved[2]) if to_precision is None else to_precision
    to_q, to_k, to_v, *others = _attend_backward(to_read, to_precision, *saved, *ctx.rules)
    return to_q, to_k, to_v, None, None, *others, *[None] * len(ctx.rules)


_attend = custom_op("kalmix::attend_chunked", _forward, _forward_fake)
_attend_backward = custom_op("kalmix::attend_chunked_backward", _backward, _backward_fake)
register_backward(_attend, "kernel 'chunked' of `attend`", _save, _pull_back)
