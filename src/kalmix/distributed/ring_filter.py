"""The op `attend` in a ring: keys, values and their times travel from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kalmix.distributed.context import Call
from kalmix.distributed.exchange import gather
from kalmix.distributed.ring import Ring
from kalmix.errors import ArgumentError
from kalmix.ops._attend.api import checked_signals
from kalmix.ops._attend.dynamics import rotate
from kalmix.ops._attend.kv_layout import EMPTY_RANK, RANK_STRIDE
from kalmix.ops._attend.scores import ScoreConfig, score_config, stack_head_params, variance_from_log_precision
from kalmix.ops._attend.tiles import InputGradients, OutputGradients, RunningSums, TileInputs
from kalmix.types import Filtered, belief_dtype, without_autocast

KERNELS = (None, "chunked")


def attend_in_ring(call: Call, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Filtered:
    """Compute `kalmix.ops.attend` at the tokens of this rank, in tiles of PyTorch operations.

    Blocks of keys are added to an online softmax, so memory is that of the own tokens and of two further blocks. The
    backward pass visits the blocks again, and the gradients of a block travel with it.

    Args:
        call: the call of the layer.
        q, k, v: tokens of this rank, as in `attend`.
        options: other arguments of `attend`.

    Returns:
        `Filtered`, without a belief.

    Raises:
        ArgumentError: an argument is wrong, or another kernel is requested.
        RuntimeError: `causal` is false.
    """
    if not options.get("causal", True):
        raise RuntimeError("attention to later tokens cannot take part in context parallelism")
    kernel = options.get("kernel")
    if kernel not in KERNELS:
        hint = 'Or pass `attention="gather"` to the ContextParallel'
        raise ArgumentError("kernel", got=repr(kernel), expected="None or 'chunked' inside a ring", hint=hint)
    call.participants += 1
    own = {name: x for name, x in options.items() if name not in ("belief", "segments")}
    signals, variance = checked_signals(q, k, v, call.segments, own)
    _, _, _, times, keys, values, weighting = signals
    dtype, heads, value_heads = belief_dtype(v.dtype), k.shape[2], v.shape[2]
    ranks, token_times = _positions(call, times)
    inside = (ranks > EMPTY_RANK)[..., None, None]
    q, k, v_ = (torch.where(inside, x.to(dtype), 0) for x in (q, k, v))
    value_frequency = (keys if values is None else values).frequency
    frequencies = keys.frequency.detach(), value_frequency.detach()
    query, key = (rotate(x, token_times, frequencies[0], forward=False) for x in (q, k))
    value = rotate(v_.unflatten(2, (heads, -1)), token_times, frequencies[1], forward=False)
    tensors = query, key, value.flatten(3), stack_head_params(keys, values, weighting, dtype)
    given = (*tensors, keys.frequency.to(dtype), value_frequency.to(dtype), token_times, ranks)
    config = score_config(values, weighting)
    settings = config, variance, call.ring(weighting.window)
    output, log_precision, unknown = call.context.uncompiled(_RingFilter.apply, *settings, *given)
    mean = rotate(output.unflatten(3, value.shape[3:]), token_times, frequencies[1], forward=True).flatten(2, 3)
    mean = torch.where(inside, mean.masked_fill(unknown[..., None, None], torch.nan), 0).to(v.dtype)
    if not variance:
        return Filtered(mean, None, None)
    total = variance_from_log_precision(log_precision[..., None]).repeat_interleave(value_heads // heads, 2)
    return Filtered(mean, torch.where(inside, total.masked_fill(unknown[..., None, None], torch.nan), 0), None)


def _positions(call: Call, times: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the ranks of this rank's tokens, as in `KVLayout`, and their times, `[B, T]`, in int64 and float64.

    Given times are counted from the first token of each batch row, so that angles of rotations are small.
    """
    device, context = call.past.device, call.context
    index = {(row, start): i for i, (row, start, _) in enumerate(context.documents or ())}
    ranks = torch.full((call.batch, call.length), EMPTY_RANK, dtype=torch.int64)
    positions = torch.zeros(call.batch, call.length, dtype=torch.int64)
    for run in call.runs.every:
        own = run.row, slice(run.start, run.stop)
        positions[own] = torch.arange(run.past, run.past + run.stop - run.start)
        ranks[own] = positions[own] + index.get((run.row, run.document), 0) * RANK_STRIDE
    ranks, positions = ranks.to(device), positions.to(device)
    if times is None:
        return ranks, positions.double()
    times = times.detach().double()
    first = gather([times[:, :1]], context.group)[0][0]  # rank 0 holds the first token in every layout
    return ranks, torch.where(ranks > EMPTY_RANK, times - first, 0)


class _RingFilter(torch.autograd.Function):
    """Attention between rotated tokens.

    Tensors are q, k and v `[B, T, H, *]`, parameters `[11, H]` and frequencies of heads, times and ranks `[B, T]`.
    Outputs are the mean `[B, T, H, V]`, the logarithm of the precision `[B, T, H]`, and which queries see a token that
    is not finite, `[B, T]`.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, config: ScoreConfig, variance: bool, ring: Ring, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, head_params, key_frequency, value_frequency, times, ranks = tensors
        finite = [x.square().sum((2, 3)).isfinite() for x in (q, k, v)]
        finite_times = times.isfinite()
        q = torch.where((finite[0] & finite_times)[..., None, None], q, 0)
        known = finite[1] & finite[2] & finite_times
        k, v = (torch.where(known[..., None, None], x, 0) for x in (k, v))
        block = [k, v, torch.where(known, times, torch.nan), ranks]  # a NaN marks a token that is not finite
        own = q, torch.where(finite_times, times, 0), ranks
        unknown = ~(finite[0] & finite_times)
        sums = RunningSums.empty(q.transpose(1, 2), v.shape[3])
        for source, visited in ring.visit(block):
            if ring.pairs[source] or source == ring.rank:
                sums.add(_tiles(own, visited, head_params, config), variance)
                unknown = unknown | config.any_visible(ranks, visited[3], visited[2].isnan())
        output, log_weight_sum, log_precision = sums.finish()
        ctx.save_for_backward(*own, *block, head_params, key_frequency, value_frequency, output, log_weight_sum,
                              log_precision)  # fmt: skip
        ctx.options = config, variance, ring
        ctx.mark_non_differentiable(unknown)
        return output, log_precision, unknown

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: Tensor, grad_log_precision: Tensor, _: Any
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # gradient checkpointing allows only one access
        own, block, others = saved[:3], saved[3:7], saved[7:]
        head_params, key_frequency, value_frequency, *results = others
        config, variance, ring = ctx.options
        upstream = OutputGradients.of(grad_output, grad_log_precision, *results, variance=variance)
        shared = [x.new_zeros(x.shape) for x in (head_params, key_frequency, value_frequency)]
        grad_q = own[0].new_zeros(own[0].transpose(1, 2).shape)

        def compute(source: int, visited: list[Tensor]) -> list[Tensor]:
            grads = [x.new_zeros(x.transpose(1, 2).shape) for x in visited[:2]]
            if ring.pairs[source] or source == ring.rank:
                inputs = _tiles(own, visited, head_params, config)
                with without_autocast(grad_q.device):
                    InputGradients(grad_q, *grads, *shared).add(inputs, upstream)
            return [x.transpose(1, 2) for x in grads]

        grad_k, grad_v = ring.sum_gradients(block, compute)
        grad_q = grad_q.transpose(1, 2).masked_fill(upstream.nonfinite[..., None], torch.nan)
        return None, None, None, grad_q, grad_k, grad_v, *shared, None, None


def _tiles(
    own: tuple[Tensor, Tensor, Tensor], visited: list[Tensor], head_params: Tensor, config: ScoreConfig
) -> TileInputs:
    """Return the inputs of tiles of own queries and visited keys."""
    (q, times, ranks), (k, v, key_times, key_ranks) = own, visited
    key_times = key_times.nan_to_num(0.0)
    return TileInputs.of(
        q, k, v, torch.cat([key_times, times], 1), torch.cat([key_ranks, ranks], 1), head_params, config
    )
