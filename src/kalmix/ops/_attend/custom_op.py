"""The Triton row of `attend`: custom ops around the kernels, which are imported when they first run."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.block_sizes import block_size, strips_of, traits_of
from kalmix.ops._attend.kv_layout import lay_out
from kalmix.ops._attend.scores import Rules, numbers_of, rules_of
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.custom_op import custom_op, needs_grad, register_backward, with_precompilation
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Adaptive Filter Attention as flash attention: tensor cores, and nothing kept of a pair. See `kalmix.ops.attend`.

    Products are taken in bfloat16 if the inputs are, else in float32.
    """
    q, k, v, times, keys, values, weighing = signals
    plain = segments is None and belief.positions.shape[1] == 0  # rows are lanes, and queries stay as they are
    copied = plain and weighing.window is None and k.dtype != belief.keys.dtype  # on the way, to be the belief
    seen, held = (k[..., :0], v[..., :0]) if copied else (k, v)
    lanes = lay_out(q[..., :0] if plain else q, seen, held, times, belief, segments, weighing.window)
    given = (q, k, v) if plain else (lanes.q, lanes.k, lanes.v)
    moves = keys if values is None else values
    rules, numbers = rules_of(values, weighing), numbers_of(keys, values, weighing, torch.float32)
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    options = (*rules, not plain or weighing.window is not None, variance, copied, dtype)
    inputs = (*given, keys.frequency, moves.frequency, lanes.times, lanes.rank, numbers)
    mean, certainty, seen, held, *_ = _average(*inputs, *options, needs_grad(*inputs))
    after = lanes.after._replace(keys=seen, values=held) if copied else lanes.after
    spread = None
    if variance:
        spread = lanes.paste((-certainty).exp().repeat_interleave(v.shape[2] // k.shape[2], 2)[..., None])
    return Filtered(lanes.paste(mean).to(v.dtype), spread, after if rules.causal else None)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    frequency: Tensor,
    frequency_of_values: Tensor,
    times: Tensor,
    rank: Tensor,
    numbers: Tensor,
    shared: bool,
    rational: bool,
    causal: bool,
    window: int,
    masked: bool,
    variance: bool,
    copied: bool,
    dtype: torch.dtype,
    trains: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor,
]:  # fmt: skip
    """The mean `[L, T, G, V]`, log of the precision `[L, T, H]` or `[0]`, k and v in float32 or `[0]`, and what is
    kept: see `triton.forward`."""
    from kalmix.ops._attend.triton.forward import forward

    inputs, rules = (q, k, v, frequency, frequency_of_values, times, rank, numbers), (shared, rational, causal, window)
    return forward(*inputs, Rules(*rules), masked, variance, copied, dtype)  # pyright: ignore[reportReturnType]


def _dry_run(
    q, k, v, w, w_0, times, rank, numbers, shared, rational, causal, window, masked, variance, copied, dtype, trains
):
    """Run the forward and the backward pass, to precompile their kernels."""
    from kalmix.ops._attend.triton.backward import backward
    from kalmix.ops._attend.triton.forward import forward

    rules = Rules(shared, rational, causal, window)
    mean, sure, _, _, *kept = forward(q, k, v, w, w_0, times, rank, numbers, rules, masked, variance, copied, dtype)
    if trains:
        backward(mean, sure, [sure, *kept], w, w_0, times, rank, numbers, rules, masked, variance, mean.dtype)


def _forward_fake(q, k, v, _, __, times, rank, ___, shared, *options):
    _rational, _causal, _window, _masked, variance, copied, dtype, _trains = options
    (count, tokens, heads, width), (_, slots, own, value_width) = q.shape, v.shape
    single = {"dtype": torch.float32, "device": q.device}
    block, surveys = block_size(slots), []
    for length in (tokens, slots):
        blocks = (length + block - 1) // block
        traits = torch.empty(count, heads, traits_of(shared), blocks * block, **single)
        surveys += [traits, times.new_empty(count, blocks), rank.new_empty(count, blocks, 2)]
    certainty = torch.empty((count, tokens, heads) if variance else (0,), **single)
    parts, strip = strips_of(value_width, dtype)
    turned = [
        v.new_empty(shape, dtype=dtype)
        for shape in (
            (count, tokens, heads, width),
            (count, slots, heads, width),
            (count, slots, own * parts, strip),
        )
    ]
    read = torch.empty(count, tokens, own * parts, strip, **single)
    totals = [torch.empty(count, own * parts, surveys[0].shape[3], **single) for _ in range(2)]
    copies = [torch.empty(x.shape if copied else (0,), **single) for x in (k, v)]
    return v.new_empty(count, tokens, own, value_width), certainty, *copies, read, *turned, *totals, *surveys


def _backward(
    to_mean: Tensor,
    to_certainty: Tensor,
    kept: list[Tensor],
    frequency: Tensor,
    frequency_of_values: Tensor,
    times: Tensor,
    rank: Tensor,
    numbers: Tensor,
    shared: bool,
    rational: bool,
    causal: bool,
    window: int,
    masked: bool,
    variance: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in `dtype`, of frequencies and of numbers; `kept` follows the mean, and copies."""
    from kalmix.ops._attend.triton.backward import backward

    rules, frequencies = Rules(shared, rational, causal, window), (frequency, frequency_of_values)
    with torch.cuda.device_of(times):
        return backward(to_mean, to_certainty, kept, *frequencies, times, rank, numbers, rules, masked, variance, dtype)


def _backward_fake(to_mean, _, kept, frequency, frequency_of_values, times, rank, numbers, *options):
    q, k = kept[2:4]
    v = k.new_empty(*k.shape[:2], *to_mean.shape[2:])
    given = (x.new_empty(x.shape, dtype=options[-1]) for x in (q, k, v))
    return *given, *(x.new_empty(x.shape) for x in (frequency, frequency_of_values, numbers))


def _keep(ctx, inputs, output):
    ctx.save_for_backward(output[1], *output[4:], *inputs[3:8])
    ctx.mark_non_differentiable(*output[4:])
    ctx.set_materialize_grads(False)
    ctx.shape, ctx.options = output[0].shape, (*inputs[8:-3], output[0].dtype)


def _pull_back(ctx, to_mean, to_certainty, to_keys, to_values, *_):
    *kept, frequency, frequency_of_values, times, rank, numbers = ctx.saved_tensors
    to_mean = kept[0].new_zeros(ctx.shape) if to_mean is None else to_mean
    to_certainty = torch.zeros_like(kept[0]) if to_certainty is None else to_certainty
    frequencies = (frequency, frequency_of_values)
    to_q, to_k, to_v, *found, to_numbers = _gradients(
        to_mean, to_certainty, kept, *frequencies, times, rank, numbers, *ctx.options
    )
    to_k, to_v = (x if y is None or not y.numel() else x + y for x, y in ((to_k, to_keys), (to_v, to_values)))
    return to_q, to_k, to_v, *found, None, None, to_numbers, *[None] * 9


_average = custom_op("kalmix::attend_triton", with_precompilation(_dry_run, _forward), _forward_fake)
_gradients = custom_op("kalmix::attend_triton_backward", _backward, _backward_fake)
register_backward(_average, "kernel 'triton' of `attend`", _keep, _pull_back)
