"""Chunked kernel of `attend`: tiles of queries and keys in PyTorch operations, with memory O(S + T).

The forward pass is an online softmax, as in flash attention. The backward pass recomputes the tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.assembly import attend_with
from kalmix.ops._attend.kv_layout import KVLayout
from kalmix.ops._attend.scores import ScoreConfig, score_config, stack_head_params, variance_from_log_precision
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._attend.tiles import InputGradients, OutputGradients, RunningSums, SumCorrection, TileInputs
from kalmix.ops._shared.custom_op import custom_op, register_backward
from kalmix.segments import Segments
from kalmix.types import Filtered, without_autocast


def attend(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute `kalmix.ops.attend` in tiles, with a backward pass written by hand."""
    return attend_with(_attend_tiles, signals, belief, segments, variance)


def _attend_tiles(layout: KVLayout, signals: AttendSignals, variance: bool) -> tuple[Tensor, Tensor | None]:
    (q, k, v, times, rank, *_), (*_, keys, values, weighting) = layout, signals
    head_params, config = stack_head_params(keys, values, weighting, q.dtype), score_config(values, weighting)
    frequencies = (x.frequency.to(q.dtype) for x in (keys, keys if values is None else values))
    output, _, log_precision = _attend(q, k, v, times, rank, head_params, *frequencies, *config, variance)
    return output, variance_from_log_precision(log_precision[..., None]) if variance else None


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
    inputs = TileInputs.of(q, k, v, times, rank, head_params, ScoreConfig(shared_dynamics, rational, causal, window))
    sums = RunningSums.empty(inputs.q, v.shape[3])
    sums.add(inputs, variance)
    output, log_weight_sum, log_precision = sums.finish()
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
    inputs = TileInputs.of(q, k, v, times, rank, head_params, ScoreConfig(shared_dynamics, rational, causal, window))
    upstream = OutputGradients.of(grad_output, grad_log_precision, output, log_weight_sum, log_precision, variance)
    zeros = [x.new_zeros(x.shape) for x in (*inputs[:3], head_params, key_frequency, value_frequency)]
    correction, grads = SumCorrection.of(inputs), InputGradients(*zeros)
    with without_autocast(q.device):  # `backward()` may be called under autocast
        has_many_tiles = grads.add(inputs, upstream, correction)
    if has_many_tiles:
        found = correction.vjp(inputs, key_frequency)
        for grad, added in zip((grads.q, grads.k, grads.head_params, grads.key_frequency), found, strict=True):
            grad.add_(added)
    grad_q, grad_k, grad_v = (x.transpose(1, 2).contiguous() for x in grads[:3])
    grad_q.masked_fill_(upstream.nonfinite[..., None], torch.nan)
    return (
        grad_q, grad_k, grad_v, grads.head_params, grads.key_frequency,
        grads.value_frequency.masked_fill(upstream.nonfinite.any(), torch.nan),
    )  # fmt: skip


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
