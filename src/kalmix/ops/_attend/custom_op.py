"""Triton kernel of `attend` as custom ops; Triton is imported when they first run."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.block_sizes import block_size, num_token_features, split_value_width
from kalmix.ops._attend.kv_layout import EMPTY_RANK, KVLayout, make_layout
from kalmix.ops._attend.scores import ScoreConfig, score_config, stack_head_params
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.custom_op import custom_op, needs_grad, register_backward, with_launch_cache, without_dispatcher
from kalmix.ops._shared.token_blocks import num_blocks
from kalmix.segments import Segments
from kalmix.types import Filtered, replace_fields


def attend(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute `kalmix.ops.attend` on tensor cores in the manner of flash attention, with memory O(S + T).

    Matrix products are in bfloat16 if the inputs are, else in float32.
    """
    q, k, v, times, keys, values, weighting = signals
    has_history = belief.positions.shape[1] > 0
    is_plain = segments is None and not has_history  # rows of the layout are batch rows
    shares_rows = segments is not None and not has_history
    # Whether the kernel copies k and v to the belief.
    copy_kv = is_plain and weighting.window is None and k.dtype != belief.keys.dtype
    if segments is not None and shares_rows:
        copy_kv = weighting.causal
        layout, index = _segment_layout(signals, belief, segments)
    else:
        unused = belief.keys.new_empty(*k.shape[:3], 0)
        layout_q, layout_k, layout_v = unused if is_plain else q, *((unused, unused) if copy_kv else (k, v))
        layout, index = make_layout(layout_q, layout_k, layout_v, times, belief, segments, weighting.window), None
    tensors = (q, k, v) if is_plain else (layout.q, layout.k, layout.v)
    value_model = keys if values is None else values
    # The kernels add gradients of shared parameters to those of keys.
    head_params = stack_head_params(keys, values, weighting, torch.float32, detach_shared=True)
    config = score_config(values, weighting)
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    options = (*config, not is_plain or weighting.window is not None, variance, copy_kv, dtype)
    inputs = (*tensors, keys.frequency, value_model.frequency, layout.times, layout.rank.contiguous(), head_params)
    mean, log_precision, layout_k, layout_v, *_ = _attend(*inputs, *options, needs_grad(*inputs))
    final_belief = layout.final_belief
    if copy_kv and segments is not None:
        layout_k, layout_v = (_slots_of_sequences(x, segments, index) for x in (layout_k, layout_v))
    if copy_kv:
        final_belief = replace_fields(final_belief, keys=layout_k, values=layout_v)
    output_variance = None
    if variance:
        output_variance = layout.to_batch(
            (-log_precision).exp().repeat_interleave(v.shape[2] // k.shape[2], 2)[..., None]
        )
    return Filtered(layout.to_batch(mean).to(v.dtype), output_variance, final_belief if config.causal else None)


def _segment_layout(
    signals: AttendSignals, belief: HistoryBelief, segments: Segments
) -> tuple[KVLayout, Tensor | None]:
    """Build the layout of sequences without a history; tokens keep their places.

    Returns:
        The layout, whose belief lacks keys and values, and the token of each slot of the belief in the flattened batch,
        int64 `[N, S]`; `None` if it has the slots of whole rows.
    """
    q, k, v, times, _keys, _values, weighting = signals
    (batch, length), count, window = q.shape[:2], segments.count, weighting.window
    shares_slots = count > batch
    slots, layout = (batch * length, "batch") if shares_slots else (length, "row")
    if window is not None and window < slots:
        slots, layout = window, "newest"
    if not weighting.causal:
        slots = 0
    rank, relative_times, token_times, positions, index = _segment_slots(
        segments.rows, None if times is None else times.detach(), batch, length, slots, layout
    )
    token_index = index if layout == "newest" else None
    if weighting.causal:
        token_times = relative_times if times is None else token_times
        slot_times = _slots_of_sequences(token_times, segments, token_index)
        belief = replace_fields(belief, times=slot_times, positions=positions)
    return KVLayout(q, k, v, relative_times, rank, belief, None, None), token_index


def _slots_of_sequences(x: Tensor, segments: Segments, index: Tensor | None) -> Tensor:
    """Return tensors of tokens `[B, T, ...]` in the slots of sequences; without `index` expanded or copied by rows."""
    if index is not None:
        return x.flatten(0, 1)[index]
    if segments.count > x.shape[0]:
        return x.flatten(0, 1).expand(segments.count, *(-1 for _ in x.shape[1:]))
    return x.expand(segments.count, *x.shape[1:]) if x.shape[0] == 1 else x[segments.rows[:, 0].long()]


def _slots(
    rows: Tensor, times: Tensor | None, batch: int, length: int, slots: int, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the layout of sequences that share batch rows.

    Args:
        rows: rows of `Segments`, `[N, 3]`.
        times: `[B, T]`, or `None` for one unit of time per token.
        batch: B.
        length: T.
        slots: slots of a sequence in the belief.
        layout: which they are: all tokens of the "batch", all of its "row", or its "newest" tokens.

    Returns:
        Ranks of tokens and times since the first token of their sequence, `[B, T]`; float64 times, `[B, T]`, empty if
        `times` is `None`; positions of the slots, `[N, slots]`; and for "newest" their tokens in the flattened batch,
        else an empty tensor.
    """
    from kalmix.ops._attend.triton.segment_slots import segment_slots

    return segment_slots(rows, times, batch, length, slots, layout)


def _slots_fake(rows, times, batch, length, slots, layout):
    rank, floats = rows.new_empty(batch, length, dtype=torch.int64), {"dtype": torch.float64}
    token_times = rows.new_empty((0,) if times is None else (batch, length), **floats)
    positions, index = (
        rows.new_empty(rows.shape[0], n, dtype=torch.int64) for n in (slots, slots if layout == "newest" else 0)
    )
    return rank, rows.new_empty(batch, length, **floats), token_times, positions, index


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    frequency: Tensor,
    value_frequency: Tensor,
    times: Tensor,
    rank: Tensor,
    head_params: Tensor,
    shared_dynamics: bool,
    rational: bool,
    causal: bool,
    window: int,
    masked: bool,
    variance: bool,
    copy_kv: bool,
    dtype: torch.dtype,
    needs_backward: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor,
]:  # fmt: skip
    """Return the mean `[R, T, G, V]`, log precision `[R, T, H]` or `[0]`, k and v in float32 or `[0]`, and tensors for
    the backward pass; see `triton.forward.forward`."""
    from kalmix.ops._attend.triton.forward import forward

    inputs, config = (
        (q, k, v, frequency, value_frequency, times, rank, head_params),
        (shared_dynamics, rational, causal, window),
    )
    return forward(*inputs, ScoreConfig(*config), masked, variance, copy_kv, dtype)  # pyright: ignore[reportReturnType]


def _dry_run(
    q,
    k,
    v,
    frequency,
    value_frequency,
    times,
    rank,
    head_params,
    shared_dynamics,
    rational,
    causal,
    window,
    masked,
    variance,
    copy_kv,
    dtype,
    needs_backward,
):
    """Run the forward and the backward pass, to precompile their kernels."""
    from kalmix.ops._attend.triton.backward import backward
    from kalmix.ops._attend.triton.forward import forward

    config = ScoreConfig(shared_dynamics, rational, causal, window)
    mean, log_precision, _, _, *saved = forward(
        q, k, v, frequency, value_frequency, times, rank, head_params, config, masked, variance, copy_kv, dtype
    )
    if needs_backward:
        backward(
            mean, log_precision, [log_precision, *saved], frequency, value_frequency, times, rank, head_params, config,
            masked, variance, mean.dtype,
        )  # fmt: skip


def _forward_fake(q, k, v, _, __, times, rank, ___, shared_dynamics, *options):
    _rational, _causal, _window, _masked, variance, copy_kv, dtype, _needs_backward = options
    (count, tokens, heads, width), (_, slots, value_heads, value_width) = q.shape, v.shape
    float32 = {"dtype": torch.float32, "device": q.device}
    block, block_tensors = block_size(slots), []
    for length in (tokens, slots):
        blocks = num_blocks(length, block)
        features = torch.empty(count, heads, num_token_features(shared_dynamics), blocks * block, **float32)
        block_tensors += [features, times.new_empty(count * blocks + 1), rank.new_empty(count * blocks * 3)]
    log_precision = torch.empty((count, tokens, heads) if variance else (0,), **float32)
    num_slices, slice_width = split_value_width(value_width, dtype)
    rotated = [
        v.new_empty(shape, dtype=dtype)
        for shape in (
            (count, tokens, heads, width),
            (count, slots, heads, width),
            (count, slots, value_heads * num_slices, slice_width),
        )
    ]
    output = torch.empty(count, tokens, value_heads * num_slices, slice_width, **float32)
    weight_sums = [torch.empty(count, value_heads * num_slices, block_tensors[0].shape[3], **float32) for _ in range(2)]
    copies = [torch.empty(x.shape if copy_kv else (0,), **float32) for x in (k, v)]
    return (
        v.new_empty(count, tokens, value_heads, value_width), log_precision, *copies, output, *rotated, *weight_sums,
        *block_tensors,
    )  # fmt: skip


def _backward(
    grad_mean: Tensor,
    grad_log_precision: Tensor,
    saved: list[Tensor],
    frequency: Tensor,
    value_frequency: Tensor,
    times: Tensor,
    rank: Tensor,
    head_params: Tensor,
    shared_dynamics: bool,
    rational: bool,
    causal: bool,
    window: int,
    masked: bool,
    variance: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, in `dtype`, of frequencies and of parameters.

    `saved` has the outputs of `_forward` that follow mean, k and v, beginning with the log precision.
    """
    from kalmix.ops._attend.triton.backward import backward

    config, frequencies = ScoreConfig(shared_dynamics, rational, causal, window), (frequency, value_frequency)
    return backward(
        grad_mean, grad_log_precision, saved, *frequencies, times, rank, head_params, config, masked, variance, dtype
    )


def _backward_fake(grad_mean, _, saved, frequency, value_frequency, times, rank, head_params, *options):
    q, k = saved[2:4]
    v = k.new_empty(*k.shape[:2], *grad_mean.shape[2:])
    tensors = (x.new_empty(x.shape, dtype=options[-1]) for x in (q, k, v))
    return *tensors, *(x.new_empty(x.shape) for x in (frequency, value_frequency, head_params))


def _save(ctx, inputs, output):
    ctx.save_for_backward(output[1], *output[4:], *inputs[3:8])
    ctx.mark_non_differentiable(*output[4:])
    ctx.set_materialize_grads(False)
    ctx.shape, ctx.options = output[0].shape, (*inputs[8:-3], output[0].dtype)


def _autograd_backward(ctx, grad_mean, grad_log_precision, grad_keys, grad_values, *_):
    *saved, frequency, value_frequency, times, rank, head_params = ctx.saved_tensors
    grad_mean = saved[0].new_zeros(ctx.shape) if grad_mean is None else grad_mean
    *_config, masked, variance, _dtype = ctx.options
    if grad_log_precision is None:
        grad_log_precision = torch.zeros_like(saved[0]) if variance else saved[0]
    frequencies = (frequency, value_frequency)
    grad_q, grad_k, grad_v, *grads, grad_head_params = _attend_backward(
        grad_mean, grad_log_precision, saved, *frequencies, times, rank, head_params, *ctx.options
    )

    def add(grad: Tensor, copied: Tensor | None) -> Tensor:
        if copied is None or not copied.numel():
            return grad
        return grad + (torch.where((rank > EMPTY_RANK)[..., None, None], copied, 0) if masked else copied)

    grad_k, grad_v = add(grad_k, grad_keys), add(grad_v, grad_values)
    return grad_q, grad_k, grad_v, *grads, None, None, grad_head_params, *[None] * 9


_slots_op = custom_op("kalmix::attend_segment_slots", with_launch_cache(_slots, _slots), _slots_fake)
_segment_slots = without_dispatcher(_slots_op)
_op = custom_op("kalmix::attend_triton", with_launch_cache(_forward, _dry_run), _forward_fake)
_backward_op = custom_op("kalmix::attend_triton_backward", with_launch_cache(_backward), _backward_fake)
_attend_backward = without_dispatcher(_backward_op)
_checked_backward = register_backward(_op, "kernel 'triton' of `attend`", _save, _autograd_backward)
_attend = without_dispatcher(_op, _save, _checked_backward)
