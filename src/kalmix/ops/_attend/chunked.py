"""Chunked kernel of `attend`: tiles of queries and keys in PyTorch operations, with memory O(S + T).

The forward pass is an online softmax, as in flash attention, with two more accumulators: values times their decay, and
precisions. The backward pass recomputes the tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.assembly import attend_with
from kalmix.ops._attend.dynamics import times_i
from kalmix.ops._attend.kv_layout import KVLayout
from kalmix.ops._attend.scores import (
    HeadParams,
    ScoreConfig,
    Scores,
    score_config,
    stack_head_params,
    variance_from_log_precision,
)
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._attend.visible_slots import VisibleSlots
from kalmix.ops._shared import batching
from kalmix.ops._shared.custom_op import custom_op, register_backward
from kalmix.segments import Segments
from kalmix.types import Filtered

QUERY_TILE = 64  # queries of a tile


def attend(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute `kalmix.ops.attend` in tiles, with a backward pass written by hand."""
    return attend_with(_attend_tiles, signals, belief, segments, variance)


def _attend_tiles(layout: KVLayout, signals: AttendSignals, variance: bool) -> tuple[Tensor, Tensor | None]:
    (q, k, v, times, rank, *_), (*_, keys, values, weighting) = layout, signals
    head_params, config = stack_head_params(keys, values, weighting, q.dtype), score_config(values, weighting)
    frequencies = (x.frequency.to(q.dtype) for x in (keys, keys if values is None else values))
    output, _, log_precision = _attend(q, k, v, times, rank, head_params, *frequencies, *config, variance)
    return output, variance_from_log_precision(log_precision[..., None]) if variance else None


class _TileInputs(NamedTuple):
    """Inputs of all tiles: q `[R, H, T, K]`, k `[R, H, S, K]`, v `[R, H, S, V]`, times and ranks `[R, S]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    times: Tensor
    rank: Tensor
    params: HeadParams
    config: ScoreConfig
    visible_slots: VisibleSlots

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, times: Tensor, rank: Tensor, head_params: Tensor, config: ScoreConfig
    ) -> _TileInputs:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return cls(q, k, v, times, rank, HeadParams.of(head_params), config, VisibleSlots(config, rank, q.shape[2]))

    def query_tiles(self) -> Iterator[slice]:
        """Return the slices of queries."""
        return (slice(i, min(i + QUERY_TILE, self.q.shape[2])) for i in range(0, self.q.shape[2], QUERY_TILE))

    def key_tiles(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of keys and their masks (true where masked); on the CPU, skip keys that no query attends to."""
        visible, query_slots = self.visible_slots.range(queries), self.visible_slots.query_slots(queries)
        max_elements = batching.MAX_ENTRIES_CPU if self.q.device.type == "cpu" else batching.MAX_ENTRIES_GPU
        size = max(QUERY_TILE, max_elements // (self.q.shape[0] * self.q.shape[1] * QUERY_TILE))
        for i in range(visible.start, visible.stop, size):
            keys = slice(i, min(i + size, visible.stop))
            mask = self.config.visible(self.rank[:, query_slots], self.rank[:, keys])
            if mask.device.type != "cpu" or bool(mask.any()):
                yield keys, ~mask

    def scores(self, queries: slice, keys: slice) -> Scores:
        """Compute the scores of a tile."""
        q, k = self.q[:, :, queries], self.k[:, :, keys]
        lag = (self.times[:, self.visible_slots.query_slots(queries), None] - self.times[:, None, keys]).to(q.dtype)[
            :, None
        ]
        squared_norms = q.square().sum(-1)[..., None], k.square().sum(-1)[..., None, :]
        return Scores.of(self.params, self.config, lag, q @ k.mT, *squared_norms)

    def scores_of_pairs(self, key: Tensor, slot: Tensor) -> Scores:
        """Compute the score of each query against one key, `[R, H, T, 1]`, given the key and its slot `[R, H, T]`."""
        time = self.times[:, None].expand(-1, slot.shape[1], -1)
        lag = (time[:, :, -slot.shape[2] :] - time.gather(2, slot)).to(self.q.dtype)[..., None]
        squared_norms = (x.square().sum(-1, keepdim=True) for x in (self.q, key))
        return Scores.of(self.params, self.config, lag, (self.q * key).sum(-1, keepdim=True), *squared_norms)


class _SumCorrection(NamedTuple):
    """Correction of score gradients so that they sum to 0 for each query, `[R, H, T]`.

    The sum is 0 in exact arithmetic. The rounding error of the sum is subtracted at the key with the largest weight.

    Attributes:
        deficit: minus the sum over the tiles so far.
        max_log_weight: logarithm of the largest weight so far.
        max_slot: slot of its key.
    """

    deficit: Tensor
    max_log_weight: Tensor
    max_slot: Tensor

    @classmethod
    def of(cls, inputs: _TileInputs) -> _SumCorrection:
        deficit = inputs.q.new_zeros(inputs.q.shape[:3])
        return cls(deficit, torch.full_like(deficit, torch.finfo(deficit.dtype).min), deficit.long())

    def add(self, queries: slice, keys: slice, grad_score: Tensor, log_weight: Tensor) -> None:
        """Add the score gradients of a tile."""
        deficit, max_log_weight, max_slot = (x[:, :, queries] for x in self)
        deficit -= grad_score.sum(-1)
        tile_max, index_in_tile = log_weight.max(-1)
        max_slot.copy_(torch.where(tile_max > max_log_weight, index_in_tile + keys.start, max_slot))
        torch.maximum(max_log_weight, tile_max, out=max_log_weight)

    def vjp(self, inputs: _TileInputs, key_frequency: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, parameters and frequencies of keys that the correction adds."""
        index = self.max_slot[..., None].expand(-1, -1, -1, inputs.k.shape[3])
        query, key = inputs.q, inputs.k.gather(2, index)
        scores, deficit = inputs.scores_of_pairs(key, self.max_slot), self.deficit[..., None]
        grad_qk, grad_query_norm, grad_key_norm, grad_head_params = scores.vjp(
            deficit, torch.zeros_like(deficit), None, self.max_log_weight[..., None]
        )
        grad_k = torch.zeros_like(inputs.k).scatter_add_(2, index, grad_qk * query + 2 * grad_key_norm * key)
        grad_key_frequency = _frequency_grad(query, grad_qk * scores.lag * key, key_frequency)
        return grad_qk * key + 2 * grad_query_norm * query, grad_k, grad_head_params, grad_key_frequency


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    times: Tensor,
    rank: Tensor,
    head_params: Tensor,
    key_frequency: Tensor,
    value_frequency: Tensor,
    shared_dynamics: bool,
    rational: bool,
    causal: bool,
    window: int,
    variance: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention between rotated tokens.

    The frequencies of keys `[H, C]` and of values `[H, D]` are unused. They are inputs because the backward pass
    returns their gradients.

    Returns:
        The output `[R, T, H, V]`, the logarithm of the sum of weights `[R, T, H]`, and the logarithm of the total
        precision, `[R, T, H]` if requested, else `[0]`.
    """
    inputs = _TileInputs.of(q, k, v, times, rank, head_params, ScoreConfig(shared_dynamics, rational, causal, window))
    outputs, log_weight_sums, log_precisions = [], [], []
    for queries in inputs.query_tiles():
        running_max = log_precision = inputs.q.new_full((*inputs.q.shape[:2], queries.stop - queries.start), -torch.inf)
        weight_sum, output = torch.zeros_like(running_max), 0.0
        for keys, masked in inputs.key_tiles(queries):
            scores = inputs.scores(queries, keys)
            score = scores.score.masked_fill(masked, -torch.inf)
            previous_max, running_max = running_max, torch.maximum(running_max, score.amax(-1))
            finite_max = running_max.clamp(min=torch.finfo(running_max.dtype).min)[..., None]  # no NaN from -inf - -inf
            rescale = (previous_max[..., None] - finite_max).exp()
            weight_sum = weight_sum * rescale[..., 0] + (score - finite_max).exp().sum(-1)
            output = output * rescale + (score - finite_max + scores.log_value_decay).exp() @ inputs.v[:, :, keys]
            if variance:
                tile_log_precision = scores.log_precision().masked_fill(masked, -torch.inf).logsumexp(-1)
                log_precision = torch.logaddexp(log_precision, tile_log_precision)
        outputs.append(output / weight_sum[..., None])
        log_weight_sums.append(running_max + weight_sum.log())
        log_precisions.append(log_precision)
    output, log_weight_sum, log_precision = (
        torch.cat(x, 2).transpose(1, 2).contiguous() for x in (outputs, log_weight_sums, log_precisions)
    )
    return output, log_weight_sum, log_precision if variance else log_precision.new_empty(0)


def _forward_fake(
    q,
    k,
    v,
    times,
    rank,
    head_params,
    key_frequency,
    value_frequency,
    shared_dynamics,
    rational,
    causal,
    window,
    variance,
):
    shape = q.shape[:3]
    return q.new_empty(*shape, v.shape[3]), q.new_empty(shape), q.new_empty(shape if variance else (0,))


def _backward(
    grad_output: Tensor,
    grad_log_precision: Tensor,
    output: Tensor,
    log_weight_sum: Tensor,
    log_precision: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    times: Tensor,
    rank: Tensor,
    head_params: Tensor,
    key_frequency: Tensor,
    value_frequency: Tensor,
    shared_dynamics: bool,
    rational: bool,
    causal: bool,
    window: int,
    variance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, parameters and frequencies.

    A query whose upstream gradient is not finite gets a NaN gradient, and so do the frequencies of values; nothing else
    is affected.

    The gradients of a query's scores sum to 0. If one key has nearly all of the weight, its score gradient is a
    difference that cancels up to rounding, and large derivatives may multiply it. So the rounding error of the sum is
    subtracted: in proportion to the weights if the query has one tile of keys, else from the heaviest key.
    """
    inputs = _TileInputs.of(q, k, v, times, rank, head_params, ScoreConfig(shared_dynamics, rational, causal, window))
    nonfinite = ~grad_output.isfinite().all(-1) | (~grad_log_precision.isfinite() if variance else False)
    grad_output = grad_output.masked_fill(nonfinite[..., None], 0)
    grad_log_precision = grad_log_precision.masked_fill(nonfinite, 0) if variance else grad_log_precision
    delta = (grad_output * output).sum(-1).transpose(1, 2)[..., None]
    grad_output, log_weight_sum = grad_output.transpose(1, 2), log_weight_sum.transpose(1, 2)[..., None]
    if variance:
        grad_log_precision, log_precision = (x.transpose(1, 2)[..., None] for x in (grad_log_precision, log_precision))
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in inputs[:3])
    grad_head_params, grad_key_frequency, grad_value_frequency = (
        x.new_zeros(x.shape) for x in (head_params, key_frequency, value_frequency)
    )
    correction, multiple_tiles = _SumCorrection.of(inputs), False
    for queries in inputs.query_tiles():
        tiles = list(inputs.key_tiles(queries))
        for keys, masked in tiles:
            scores = inputs.scores(queries, keys)
            query, key, value = inputs.q[:, :, queries], inputs.k[:, :, keys], inputs.v[:, :, keys]
            log_weight = scores.score.masked_fill(masked, -torch.inf) - log_weight_sum[:, :, queries]
            decayed_weight, grad_outputs = (log_weight + scores.log_value_decay).exp(), grad_output[:, :, queries]
            grad_v[:, :, keys] += decayed_weight.mT @ grad_outputs
            grad_log_value_decay = decayed_weight * (grad_outputs @ value.mT)
            weight = log_weight.exp()
            grad_score = grad_log_value_decay - weight * delta[:, :, queries]
            if len(tiles) == 1:
                grad_score = torch.addcmul(grad_score, weight, grad_score.sum(-1, keepdim=True), value=-1)
            else:
                multiple_tiles = True
                correction.add(queries, keys, grad_score, log_weight)
            tile_grad_log_precision = None
            if variance:
                log_share = scores.log_precision().masked_fill(masked, -torch.inf) - log_precision[:, :, queries]
                tile_grad_log_precision = log_share.exp() * grad_log_precision[:, :, queries]
            grad_qk, grad_query_norm, grad_key_norm, grad_tile_params = scores.vjp(
                grad_score, grad_log_value_decay, tile_grad_log_precision, log_weight.masked_fill(masked, 0)
            )
            grad_q[:, :, queries] += grad_qk @ key + 2 * grad_query_norm.sum(-1)[..., None] * query
            grad_k[:, :, keys] += grad_qk.mT @ query + 2 * grad_key_norm.sum(-2)[..., None] * key
            grad_head_params += grad_tile_params
            grad_key_frequency += _frequency_grad(query, (grad_qk * scores.lag) @ key, key_frequency)
            grad_value_frequency += _frequency_grad(
                grad_outputs, (decayed_weight * scores.lag) @ value, value_frequency
            )
    if multiple_tiles:
        corrections = correction.vjp(inputs, key_frequency)
        grad_q, grad_k, grad_head_params, grad_key_frequency = (
            x + y for x, y in zip((grad_q, grad_k, grad_head_params, grad_key_frequency), corrections, strict=True)
        )
    grad_q, grad_k, grad_v = (x.transpose(1, 2).contiguous() for x in (grad_q, grad_k, grad_v))
    grad_q.masked_fill_(nonfinite[..., None], torch.nan)
    return (
        grad_q, grad_k, grad_v, grad_head_params, grad_key_frequency,
        grad_value_frequency.masked_fill(nonfinite.any(), torch.nan),
    )  # fmt: skip


def _frequency_grad(x: Tensor, lagged: Tensor, frequency: Tensor) -> Tensor:
    """Return the gradient of frequencies `[H, C]` through x'y if y rotates by frequency * lag; `lagged` is lag * y."""
    heads, channels = frequency.shape
    x, lagged = (y.unflatten(-1, (-1, 2 * channels)) for y in (x, lagged))  # split the value heads of a key head
    return (x * times_i(lagged)).sum((0, 2, 3)).view(heads, 2, channels).sum(1)


def _backward_fake(
    grad_output, grad_log_precision, output, log_weight_sum, log_precision, q, k, v, times, rank, *params_and_config
):
    inputs = (q, k, v, *params_and_config[:3])
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.config = inputs[8:]


def _autograd_backward(ctx, grad_output, _, grad_log_precision):
    output, *_rest = saved = ctx.saved_tensors
    grad_output = torch.zeros_like(output) if grad_output is None else grad_output
    grad_log_precision = torch.zeros_like(saved[2]) if grad_log_precision is None else grad_log_precision
    grad_q, grad_k, grad_v, *others = _attend_backward(grad_output, grad_log_precision, *saved, *ctx.config)
    return grad_q, grad_k, grad_v, None, None, *others, *[None] * len(ctx.config)


_attend = custom_op("kalmix::attend_chunked", _forward, _forward_fake)
_attend_backward = custom_op("kalmix::attend_chunked_backward", _backward, _backward_fake)
register_backward(_attend, "kernel 'chunked' of `attend`", _save, _autograd_backward)
