"""Triton kernel of `attend_radial` as custom ops; Triton is imported when they first run."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.kv_layout import make_layout
from kalmix.ops._attend.radial_kernel import unit_rows
from kalmix.ops._attend.scores import ScoreConfig, score_config, variance_from_log_precision
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.custom_op import custom_op, needs_grad, register_backward, with_launch_cache, without_dispatcher
from kalmix.segments import Segments
from kalmix.types import Filtered

KERNEL = "kernel 'triton' of `attend_radial`"


def attend_radial(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute `kalmix.ops.attend_radial` on tensor cores in the manner of flash attention, with memory O(S + T).

    Matrix products are in bfloat16 if the inputs are, else in float32.
    """
    q, k, v, times, dynamics, _, weighting = signals
    is_plain = segments is None and belief.positions.shape[1] == 0  # rows of the layout are batch rows
    layout = make_layout(q, k, v, times, belief, segments, weighting.window)
    tensors = (q, k, v) if is_plain else layout[:3]
    config = score_config(None, weighting)
    columns = (-dynamics.log_decay[:, None], *dynamics[2:], *weighting[:2], weighting.floor[:, None])
    head_params = torch.cat([x.to(torch.float32) for x in columns], 1)
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    options = (config.rational, config.causal, config.window, not is_plain or weighting.window is not None, variance)
    inputs = (*tensors, dynamics.frequency.to(torch.float32), layout.times, layout.rank, head_params)
    mean, log_precision, *_ = _attend(*inputs, *options, dtype, needs_grad(*inputs))
    output_variance = None
    if variance:
        log_precision = log_precision.permute(0, 1, 3, 2)[..., None]
        # Gradients must not pass through NaN of queries that attend to one, nor through their own values.
        is_nan = log_precision[0].isnan()
        along, across = variance_from_log_precision(log_precision.masked_fill(is_nan, 0))
        unit = unit_rows(layout.v[:, layout.v.shape[1] - mean.shape[1] :].masked_fill(is_nan, 0))
        radial_share = unit.unflatten(-1, (2, -1)).square().sum(-2).repeat(1, 1, 1, 2)  # per channel
        output_variance = layout.to_batch(torch.lerp(across, along, radial_share).masked_fill(is_nan, torch.nan))
    return Filtered(layout.to_batch(mean).to(v.dtype), output_variance, layout.final_belief if config.causal else None)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    frequency: Tensor,
    times: Tensor,
    rank: Tensor,
    head_params: Tensor,
    rational: bool,
    causal: bool,
    window: int,
    masked: bool,
    variance: bool,
    dtype: torch.dtype,
    needs_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean `[R, T, H, 2 C]`, log precision `[2, R, H, T]` or `[0]`, and tensors for the backward pass; see
    `triton.radial_forward.forward`."""
    from kalmix.ops._attend.triton.radial_forward import forward

    config = ScoreConfig(True, rational, causal, window)
    inputs = (q, k, v, frequency, times, rank, head_params)
    return forward(*inputs, config, masked, variance, dtype)  # pyright: ignore[reportReturnType]


def _dry_run(
    q, k, v, frequency, times, rank, head_params, rational, causal, window, masked, variance, dtype, needs_backward
):
    """Run the forward and the backward pass, to precompile their kernels."""
    from kalmix.ops._attend.triton.radial_backward import backward
    from kalmix.ops._attend.triton.radial_forward import forward

    config = ScoreConfig(True, rational, causal, window)
    mean, *saved = forward(q, k, v, frequency, times, rank, head_params, config, masked, variance, dtype)
    if needs_backward:
        backward(mean, saved[0], saved, v, frequency, times, rank, head_params, config, masked, variance, v.dtype)


def _forward_fake(q, k, v, _frequency, _times, _rank, _params, rational, causal, window, masked, variance, dtype, _):
    (rows, tokens, heads, width), slots = q.shape, k.shape[1]
    float32 = {"dtype": torch.float32, "device": q.device}
    per_query = (rows, heads, tokens)
    return (
        v.new_empty(q.shape), torch.empty((2, *per_query) if variance else (0,), **float32),
        torch.empty(*per_query, width, **float32), torch.empty(per_query, **float32),
        *(torch.empty(2, *per_query, **float32) for _ in range(2)),
        *(v.new_empty(rows, heads, n, width, dtype=dtype) for n in (tokens, tokens, slots, slots)),
        torch.empty(3, *per_query, **float32), torch.empty(rows, heads, slots, **float32),
    )  # fmt: skip


def _backward(
    grad_mean: Tensor,
    grad_log_precision: Tensor,
    saved: list[Tensor],
    v: Tensor,
    frequency: Tensor,
    times: Tensor,
    rank: Tensor,
    head_params: Tensor,
    rational: bool,
    causal: bool,
    window: int,
    masked: bool,
    variance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, of frequencies and of parameters.

    `saved` has the outputs of `_forward` that follow the mean.
    """
    from kalmix.ops._attend.triton.radial_backward import backward

    config = ScoreConfig(True, rational, causal, window)
    tensors = (v, frequency, times, rank, head_params)
    return backward(grad_mean, grad_log_precision, saved, *tensors, config, masked, variance, v.dtype)


def _backward_fake(grad_mean, _grad_log_precision, saved, v, frequency, _times, _rank, head_params, *_options):
    like = (grad_mean, v, v, frequency, head_params)
    return tuple(v.new_empty(x.shape, dtype=x.dtype if i > 2 else v.dtype) for i, x in enumerate(like))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*output[1:], *inputs[2:7])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.shape, ctx.options = output[0].shape, inputs[7:12]


def _autograd_backward(ctx, grad_mean, grad_log_precision, *_):
    *saved, v, frequency, times, rank, head_params = ctx.saved_tensors
    grad_mean = v.new_zeros(ctx.shape) if grad_mean is None else grad_mean
    grad_log_precision = torch.zeros_like(saved[0]) if grad_log_precision is None else grad_log_precision
    grad_q, grad_k, grad_v, grad_frequency, grad_params = _attend_backward(
        grad_mean, grad_log_precision.contiguous(), saved, v, frequency, times, rank, head_params, *ctx.options
    )
    return grad_q, grad_k, grad_v, grad_frequency, None, None, grad_params, *[None] * 7


_op = custom_op("kalmix::attend_radial_triton", with_launch_cache(_forward, _dry_run), _forward_fake)
_backward_op = custom_op("kalmix::attend_radial_triton_backward", with_launch_cache(_backward), _backward_fake)
_attend_backward = without_dispatcher(_backward_op)
_checked_backward = register_backward(_op, KERNEL, _save, _autograd_backward)
_attend = without_dispatcher(_op, _save, _checked_backward)
