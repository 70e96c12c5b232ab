"""Reference kernel of `attend`: all pairs of queries and keys at once, in PyTorch operations. Memory O(T (S + T))."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.assembly import attend_with
from kalmix.ops._attend.dynamics import frequency_grad_carrier, times_i
from kalmix.ops._attend.kv_layout import KVLayout
from kalmix.ops._attend.scores import HeadParams, Scores, score_config, stack_head_params, variance_from_log_precision
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.products import masked_product, product
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute `kalmix.ops.attend` with support for every kind of differentiation."""
    return attend_with(_attend, signals, belief, segments, variance)


def _attend(layout: KVLayout, signals: AttendSignals, variance: bool) -> tuple[Tensor, Tensor | None]:
    (q, k, v, times, rank, *_), (*_, key_dynamics, value_dynamics, weighting) = layout, signals
    tokens, config = q.shape[1], score_config(value_dynamics, weighting)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lag = (times[:, -tokens:, None] - times[:, None]).to(q.dtype)[:, None]
    squared_norms = q.square().sum(-1)[..., None], k.square().sum(-1)[..., None, :]
    qk, carrier = product(q, k.mT), frequency_grad_carrier(key_dynamics.frequency, q.dtype)
    if carrier is not None:
        first, second = product(carrier * q, times_i(k).mT), product(carrier.square() * q, k.mT)
        qk = qk + lag * first - lag.square() / 2 * second
    scores = Scores.of(
        HeadParams.of(stack_head_params(key_dynamics, value_dynamics, weighting, q.dtype)),
        config,
        lag,
        qk,
        *squared_norms,
    )
    masked = ~config.visible(rank[:, -tokens:], rank)
    weights = scores.score.masked_fill(masked, -torch.inf).log_softmax(-1) + scores.log_value_decay
    output, value_carrier = (
        masked_product(weights.exp(), v),
        frequency_grad_carrier((key_dynamics if value_dynamics is None else value_dynamics).frequency, q.dtype),
    )
    if value_carrier is not None:
        rotated = times_i(v.unflatten(-1, (-1, value_carrier.shape[-1]))).flatten(-2)  # per value head
        value_carrier, weight_lag = (
            value_carrier.repeat(1, 1, v.shape[-1] // value_carrier.shape[-1]),
            weights.exp() * lag,
        )
        first, second = masked_product(weight_lag, rotated), masked_product(weight_lag * lag, v)
        output = output + value_carrier * first - value_carrier.square() / 2 * second
    output = output.transpose(1, 2)
    if not variance:
        return output, None
    log_precision = scores.log_precision().masked_fill(masked, -torch.inf).logsumexp(-1, keepdim=True)
    return output, variance_from_log_precision(log_precision).transpose(1, 2)
