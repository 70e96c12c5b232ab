"""Tiles of queries and keys of `attend` in PyTorch operations: an online softmax, and its backward pass.

The online softmax is that of flash attention, with two more accumulators: values times their decay, and precisions. The
backward pass recomputes the tiles. Both can process the keys of a query in several calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._attend.dynamics import times_i
from kalmix.ops._attend.scores import HeadParams, ScoreConfig, Scores
from kalmix.ops._attend.visible_slots import VisibleSlots
from kalmix.ops._shared import batching

QUERY_TILE = 64  # queries of a tile


class TileInputs(NamedTuple):
    """Inputs of all tiles: q `[R, H, T, K]`, k `[R, H, S, K]`, v `[R, H, S, V]`, times and ranks.

    Times and ranks are `[R, S]` if the queries are those of the last T slots, else `[R, S + T]`: those of keys, then
    those of queries.
    """

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
    ) -> TileInputs:
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
        stop = min(visible.stop, self.k.shape[2])
        for i in range(visible.start, stop, size):
            keys = slice(i, min(i + size, stop))
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


class SumCorrection(NamedTuple):
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
    def of(cls, inputs: TileInputs) -> SumCorrection:
        deficit = inputs.q.new_zeros(inputs.q.shape[:3])
        return cls(deficit, torch.full_like(deficit, torch.finfo(deficit.dtype).min), deficit.long())

    def add(self, queries: slice, keys: slice, grad_score: Tensor, log_weight: Tensor) -> None:
        """Add the score gradients of a tile."""
        deficit, max_log_weight, max_slot = (x[:, :, queries] for x in self)
        deficit -= grad_score.sum(-1)
        tile_max, index_in_tile = log_weight.max(-1)
        max_slot.copy_(torch.where(tile_max > max_log_weight, index_in_tile + keys.start, max_slot))
        torch.maximum(max_log_weight, tile_max, out=max_log_weight)

    def vjp(self, inputs: TileInputs, key_frequency: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, parameters and frequencies of keys that the correction adds."""
        index = self.max_slot[..., None].expand(-1, -1, -1, inputs.k.shape[3])
        query, key = inputs.q, inputs.k.gather(2, index)
        scores, deficit = inputs.scores_of_pairs(key, self.max_slot), self.deficit[..., None]
        grad_qk, grad_query_norm, grad_key_norm, grad_head_params = scores.vjp(
            deficit, torch.zeros_like(deficit), None, self.max_log_weight[..., None]
        )
        grad_k = torch.zeros_like(inputs.k).scatter_add_(2, index, grad_qk * query + 2 * grad_key_norm * key)
        grad_key_frequency = frequency_grad(query, grad_qk * scores.lag * key, key_frequency)
        return grad_qk * key + 2 * grad_query_norm * query, grad_k, grad_head_params, grad_key_frequency


class RunningSums(NamedTuple):
    """Sums over the keys so far, updated in place.

    Attributes:
        max_score: largest score, `[R, H, T]`.
        weight_sum: sum of weights, divided by exp(max_score), `[R, H, T]`.
        output: sum of weights times decayed values, likewise, `[R, H, T, V]`.
        log_precision: logarithm of the sum of precisions, `[R, H, T]`; unused without a variance.
    """

    max_score: Tensor
    weight_sum: Tensor
    output: Tensor
    log_precision: Tensor

    @classmethod
    def empty(cls, q: Tensor, value_width: int) -> RunningSums:
        """Return the sums over no keys, for queries `[R, H, T, K]`."""
        none = torch.full_like(q[..., 0], -torch.inf)
        return cls(none, torch.zeros_like(none), q.new_zeros(*q.shape[:3], value_width), none.clone())

    def add(self, inputs: TileInputs, variance: bool) -> None:
        """Add the keys of `inputs`; with `variance` also their precisions."""
        for queries in inputs.query_tiles():
            max_score, weight_sum, output, log_precision = (x[:, :, queries] for x in self)
            for keys, masked in inputs.key_tiles(queries):
                scores = inputs.scores(queries, keys)
                score = scores.score.masked_fill(masked, -torch.inf)
                new_max = torch.maximum(max_score, score.amax(-1))
                finite_max = new_max.clamp(min=torch.finfo(new_max.dtype).min)[..., None]  # no NaN from -inf - -inf
                rescale = (max_score[..., None] - finite_max).exp()
                weight_sum.copy_(weight_sum * rescale[..., 0] + (score - finite_max).exp().sum(-1))
                decayed = (score - finite_max + scores.log_value_decay).exp()
                output.copy_(output * rescale + decayed @ inputs.v[:, :, keys])
                max_score.copy_(new_max)
                if variance:
                    tile_log_precision = scores.log_precision().masked_fill(masked, -torch.inf).logsumexp(-1)
                    log_precision.copy_(torch.logaddexp(log_precision, tile_log_precision))

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return output `[R, T, H, V]`, and logarithms of the sums of weights and of precisions `[R, T, H]`."""
        results = self.output / self.weight_sum[..., None], self.max_score + self.weight_sum.log(), self.log_precision
        output, log_weight_sum, log_precision = (x.transpose(1, 2).contiguous() for x in results)
        return output, log_weight_sum, log_precision


class OutputGradients(NamedTuple):
    """Upstream gradients of queries, and what the backward pass needs of the forward pass.

    Attributes:
        output: gradient of the output, `[R, H, T, V]`; 0 where it is not finite.
        log_precision: gradient of the logarithm of the precision, `[R, H, T, 1]` or `None`, likewise.
        delta: inner product of the output and its gradient, `[R, H, T, 1]`.
        log_weight_sum: `[R, H, T, 1]`.
        total_log_precision: `[R, H, T, 1]`, or `None`.
        nonfinite: whether an upstream gradient is not finite, `[R, T, H]`.
    """

    output: Tensor
    log_precision: Tensor | None
    delta: Tensor
    log_weight_sum: Tensor
    total_log_precision: Tensor | None
    nonfinite: Tensor

    @classmethod
    def of(
        cls,
        grad_output: Tensor,
        grad_log_precision: Tensor,
        output: Tensor,
        log_weight_sum: Tensor,
        log_precision: Tensor,
        variance: bool,
    ) -> OutputGradients:
        """Prepare upstream gradients; tensors are `[R, T, H]`, and `[R, T, H, V]` for outputs."""
        nonfinite = ~grad_output.isfinite().all(-1) | (~grad_log_precision.isfinite() if variance else False)
        grad_output = grad_output.masked_fill(nonfinite[..., None], 0)
        grad_log_precision = grad_log_precision.masked_fill(nonfinite, 0) if variance else grad_log_precision
        delta = (grad_output * output).sum(-1).transpose(1, 2)[..., None]
        grad_output, log_weight_sum = grad_output.transpose(1, 2), log_weight_sum.transpose(1, 2)[..., None]
        if not variance:
            return cls(grad_output, None, delta, log_weight_sum, None, nonfinite)
        pair = (x.transpose(1, 2)[..., None] for x in (grad_log_precision, log_precision))
        grad_log_precision, log_precision = pair
        return cls(grad_output, grad_log_precision, delta, log_weight_sum, log_precision, nonfinite)


class InputGradients(NamedTuple):
    """Sums of gradients of the inputs, updated in place: q, k and v as in `TileInputs`, parameters and frequencies."""

    q: Tensor
    k: Tensor
    v: Tensor
    head_params: Tensor
    key_frequency: Tensor
    value_frequency: Tensor

    def add(self, inputs: TileInputs, upstream: OutputGradients, correction: SumCorrection | None = None) -> bool:
        """Add the gradients of all tiles.

        A `correction` requires that `inputs` has all keys. It also corrects queries with one tile of keys, in
        proportion to the weights.

        Returns:
            Whether a query has several tiles, so that `correction.vjp` must be added.
        """
        multiple_tiles = False
        for queries in inputs.query_tiles():
            tiles = list(inputs.key_tiles(queries))
            for keys, masked in tiles:
                scores = inputs.scores(queries, keys)
                query, key, value = inputs.q[:, :, queries], inputs.k[:, :, keys], inputs.v[:, :, keys]
                log_weight = scores.score.masked_fill(masked, -torch.inf) - upstream.log_weight_sum[:, :, queries]
                decayed_weight = (log_weight + scores.log_value_decay).exp()
                grad_outputs = upstream.output[:, :, queries]
                self.v[:, :, keys] += decayed_weight.mT @ grad_outputs
                weight = log_weight.exp()
                # Set masked pairs to 0 after each product that may overflow: there 0 times infinity is NaN.
                grad_log_value_decay = (decayed_weight * (grad_outputs @ value.mT)).masked_fill(masked, 0)
                grad_score = grad_log_value_decay - (weight * upstream.delta[:, :, queries]).masked_fill(masked, 0)
                if correction is not None and len(tiles) == 1:
                    grad_score = torch.addcmul(grad_score, weight, grad_score.sum(-1, keepdim=True), value=-1)
                    grad_score = grad_score.masked_fill(masked, 0)
                elif correction is not None:
                    multiple_tiles = True
                    correction.add(queries, keys, grad_score, log_weight)
                grad_log_precision = None
                if upstream.log_precision is not None and upstream.total_log_precision is not None:
                    log_precision = scores.log_precision().masked_fill(masked, -torch.inf)
                    share = (log_precision - upstream.total_log_precision[:, :, queries]).exp()
                    grad_log_precision = share * upstream.log_precision[:, :, queries]
                grad_qk, grad_query_norm, grad_key_norm, grad_tile_params = scores.vjp(
                    grad_score, grad_log_value_decay, grad_log_precision, log_weight.masked_fill(masked, 0)
                )
                self.q[:, :, queries] += grad_qk @ key + 2 * grad_query_norm.sum(-1)[..., None] * query
                self.k[:, :, keys] += grad_qk.mT @ query + 2 * grad_key_norm.sum(-2)[..., None] * key
                self.head_params.add_(grad_tile_params)
                self.key_frequency.add_(frequency_grad(query, (grad_qk * scores.lag) @ key, self.key_frequency))
                lagged = (decayed_weight * scores.lag) @ value
                self.value_frequency.add_(frequency_grad(grad_outputs, lagged, self.value_frequency))
        return multiple_tiles


def frequency_grad(x: Tensor, lagged: Tensor, frequency: Tensor) -> Tensor:
    """Return the gradient of frequencies `[H, C]` through x'y if y rotates by frequency * lag; `lagged` is lag * y."""
    heads, channels = frequency.shape
    x, lagged = (y.unflatten(-1, (-1, 2 * channels)) for y in (x, lagged))  # split the value heads of a key head
    return (x * times_i(lagged)).sum((0, 2, 3)).view(heads, 2, channels).sum(1)
