"""Common parts of the torch kernels of `attend`: layout, rotation of tokens to time 0, and treatment of NaN.

After the rotation by exp(-i w t), a pair of tokens depends on time through its lag only by decay. In products of tiles,
0 times NaN is NaN, so a token that is not finite would affect queries that do not attend to it. Such tokens are set to
0 first, and queries that attend to one, or are one, return NaN. No gradient flows back from their outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.dynamics import rotate
from kalmix.ops._attend.kv_layout import KVLayout, make_layout
from kalmix.ops._attend.scores import ScoreConfig, score_config
from kalmix.ops._attend.signals import AttendSignals
from kalmix.segments import Segments
from kalmix.types import Filtered, replace_fields

# (layout, signals, variance) -> output `[R, T, H, V]`, and its variance `[R, T, H, 1]` (or one per column of a value
# head) if requested. The v of the layout is `[R, S, H, V]`, with the value heads of a key head concatenated.
# Frequencies are detached here: the function adds their gradient, see `frequency_grad_carrier`.
AttendFn = Callable[[KVLayout, AttendSignals, bool], tuple[Tensor, Tensor | None]]


def attend_with(
    attend: AttendFn, signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool
) -> Filtered:
    """Filter with a function that computes attention between rotated tokens."""
    q, k, v, times, key_dynamics, value_dynamics, weighting = signals
    layout, nan_queries = _zero_nonfinite_tokens(
        make_layout(q, k, v, times, belief, segments, weighting.window), score_config(value_dynamics, weighting)
    )
    times = layout.times
    query_times, heads, value_frequency = (
        times[:, times.shape[1] - layout.q.shape[1] :],
        k.shape[2],
        (key_dynamics if value_dynamics is None else value_dynamics).frequency.detach(),
    )
    query, key = (
        rotate(x, t, key_dynamics.frequency.detach(), forward=False)
        for x, t in ((layout.q, query_times), (layout.k, times))
    )
    value = rotate(layout.v.unflatten(2, (heads, -1)), times, value_frequency, forward=False)
    rotated_layout = replace_fields(layout, q=query, k=key, v=value.flatten(3))
    output, output_variance = attend(rotated_layout, signals, variance)
    mean = rotate(output.unflatten(3, value.shape[3:]), query_times, value_frequency, forward=True).flatten(2, 3)
    mean = mean.masked_fill(nan_queries, torch.nan)
    if output_variance is not None:
        output_variance = layout.to_batch(
            output_variance.repeat_interleave(v.shape[2] // heads, 2).masked_fill(nan_queries, torch.nan)
        )
    return Filtered(
        layout.to_batch(mean).to(v.dtype), output_variance, layout.final_belief if weighting.causal else None
    )


def _zero_nonfinite_tokens(layout: KVLayout, config: ScoreConfig) -> tuple[KVLayout, Tensor]:
    """Set tokens whose squared norm is not finite to 0; also return which queries are or see one, `[R, T, 1, 1]`."""
    finite_queries = _squared_norms(layout.q).isfinite()
    finite_keys = (_squared_norms(layout.k) + _squared_norms(layout.v) + 0 * layout.times).isfinite()
    q, k, v = (
        torch.where(y[..., None, None], x, 0)
        for x, y in ((layout.q, finite_queries), (layout.k, finite_keys), (layout.v, finite_keys))
    )
    finite_layout = replace_fields(layout, q=q, k=k, v=v, times=torch.where(finite_keys, layout.times, 0))
    query_rank = layout.rank[:, layout.rank.shape[1] - layout.q.shape[1] :]
    return finite_layout, (~finite_queries | config.any_visible(query_rank, layout.rank, ~finite_keys))[..., None, None]


def _squared_norms(x: Tensor) -> Tensor:
    """Return the squared norm of each token over its heads, `[R, T]`."""
    return x.detach().square().sum((2, 3))
