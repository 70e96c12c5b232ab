"""Short causal convolution with its activation, exact across calls and packed sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.layers.fused.activations import ACTIVATIONS
from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import uses_triton
from kalmix.layers.fused.unit_norm import QueryKeyColumns, UnitNorm
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher
from kalmix.segments import Segments, mask_outside, segments_without_checks
from kalmix.types import dependent_zero

MAX_TAPS = 4  # of the Triton form
MAX_WIDTH = 256  # columns of a head that a program of the Triton form scales to unit length
_ONEDNN = torch.backends.mkldnn.is_available()  # read at import: torch.compile cannot trace this call


class Packing(NamedTuple):
    """Segments with the sequence of each token, `segments.segment_ids(B, T)`."""

    segments: Segments
    ids: Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    packing: Packing | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each channel over time, add a bias and apply an activation.

        y_t = act(bias + sum_s weight_s u_{t - S + 1 + s})

    u is the history of the sequence: the inputs in its state, then its tokens.

    Args:
        x: `[B, T, C]`. May be a view of a wider tensor.
        weight: `[C, S]`, S taps; the last one multiplies the present token.
        bias: `[C]`, or `None`.
        state: last S - 1 inputs of each sequence, `[N, S - 1, C]` in the dtype of `x`; `None` for zeros.
        packing: runs of tokens that form sequences; by default each batch row is one sequence.
        activation: "silu", or `None`.

    Returns:
        y `[B, T, C]` in the dtype of `x`, 0 outside segments, and the new state `[N, S - 1, C]`.

    Complexity: O(S) per element. Training stores the inputs.

    Example:
        >>> from kalmix.layers.fused import short_convolution
        >>> x, weight = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[10.0, 1.0]])
        >>> y, state = short_convolution(x, weight)
        >>> y.flatten().tolist(), state.tolist()
        ([1.0, 12.0, 23.0], [[[3.0]]])
    """
    columns = QueryKeyColumns()
    return convolve_qkv(x, weight, bias, state, packing, activation, columns)[2:]


def convolve_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    packing: Packing | None,
    activation: str | None,
    columns: QueryKeyColumns,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convolve queries, keys and values as `short_convolution` does, and scale heads of q and k to unit length.

    Args:
        x: `[B, T, C]`: columns of the queries, the keys and the values, in this order.
        weight, bias, state, packing, activation: see `short_convolution`.
        columns: number of columns of queries and keys, n, and their norm; its width divides n.

    Returns:
        q and k `[B, T, n]` and v `[B, T, C - 2 n]` in the dtype of `x`, 0 outside segments; the new state.

    Complexity: O(S) per element. Training stores the inputs.

    Example:
        >>> from kalmix.layers.fused import QueryKeyColumns, UnitNorm, convolve_qkv
        >>> x, weight = torch.tensor([[[3.0, 4.0, 0.0, 5.0, 7.0]]]), torch.ones(5, 1)
        >>> columns = QueryKeyColumns(2, UnitNorm(width=2))
        >>> q, k, v, _ = convolve_qkv(x, weight, None, None, None, None, columns)
        >>> q, k, v
        (tensor([[[0.6000, 0.8000]]]), tensor([[[0., 1.]]]), tensor([[[7.]]]))
    """
    if weight.shape[1] > MAX_TAPS or not uses_triton("short_convolution", x):
        return _eager_qkv(x, weight, bias, state, packing, activation, columns)
    rows, ids = (None, None) if packing is None else (packing.segments.rows, packing.ids)
    norm = columns.norm if fits_program(columns) else UnitNorm()
    q, k, v, final_state = _convolution(x, weight, bias, state, rows, ids, activation or "none", columns.keys, *norm)
    if norm is not columns.norm:
        q, k = columns.normalize(q, k)
    return q, k, v, final_state


def fits_program(columns: QueryKeyColumns) -> bool:
    """Return whether programs hold whole heads, so that the kernel of the convolution also scales them."""
    return columns.norm.width <= MAX_WIDTH


def _eager_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    packing: Packing | None,
    activation: str | None,
    columns: QueryKeyColumns,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, final_state = _eager(x, weight, bias, state, packing, activation)
    q, k, v = columns.split(y)
    return *columns.normalize(q, k), v, final_state


def _eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    packing: Packing | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    sequences = x.shape[0] if packing is None else packing.segments.count
    if state is None:
        state = x.new_zeros(sequences, weight.shape[1] - 1, x.shape[2])
    if x.shape[1] == 0:
        return x + dependent_zero(x, weight, bias), state
    if packing is None:
        history = torch.cat([state, x], dim=1)
        final_state = history[:, x.shape[1] :].clone()  # a view would keep all inputs alive
        y = _slide(history, weight)
    else:
        y, final_state = _convolve_segments(x, weight, state, packing)
    if bias is not None:
        y = mask_outside(y + bias.to(y.dtype), None if packing is None else packing.ids)
    return y if activation is None else ACTIVATIONS[activation](y), final_state


def _slide(history: Tensor, weight: Tensor, masks: list[Tensor] | None = None) -> Tensor:
    """Convolve `[N, L + S - 1, C]` to `[N, L, C]`; `masks` selects the tokens that each tap may use.

    On a CPU, oneDNN takes a quarter of the time of the sum over taps, if channels are contiguous.
    """
    length = history.shape[1] - weight.shape[1] + 1
    if masks is None and _ONEDNN and history.device.type == "cpu" and history.dtype == torch.float32:
        with torch.autocast("cpu", enabled=False):
            image, taps = history.mT[:, :, None], weight.to(history.dtype)[:, None, None]
            return F.conv2d(image, taps, groups=weight.shape[0]).squeeze(2).mT
    output = history.new_zeros(())
    for tap, factor in enumerate(weight.to(history.dtype).unbind(1)):
        inputs = history[:, tap : tap + length]
        output = output + (inputs if masks is None else torch.where(masks[tap], inputs, 0)) * factor
    return output


def _convolve_segments(x: Tensor, weight: Tensor, state: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    batch, length, _ = x.shape
    taps, ids = weight.shape[1], packing.ids
    past = taps - 1
    earlier_ids = F.pad(ids, (past, 0), value=-2)
    masks = [((earlier_ids[:, tap : tap + length] == ids) & (ids >= 0))[..., None] for tap in range(taps)]
    within = _slide(F.pad(x, (0, 0, past, 0)), weight, masks)
    if past == 0:
        return within, state

    # Add the contribution of the state to the first inputs of each sequence.
    row, start, stop = packing.segments.rows.long()[:, :, None].unbind(1)
    from_state = _slide(F.pad(state, (0, 0, 0, past)), weight)
    token = start + torch.arange(past, device=x.device)
    index = torch.where(token < stop, row * length + token, 0).flatten()
    from_state = torch.where((token < stop)[..., None], from_state, 0).flatten(0, 1)
    output = within.flatten(0, 1).index_add(0, index, from_state).unflatten(0, (batch, length))

    # The new state: inputs of this call, preceded by the old state if there are fewer than S - 1.
    token = stop - past + torch.arange(past, device=x.device)
    current = x.flatten(0, 1)[row * length + token.clamp(min=0)]
    previous = (stop - start + torch.arange(past, device=x.device)).clamp(max=past - 1)
    previous = state.gather(1, previous[..., None].expand_as(state))
    return output, torch.where((token >= start)[..., None], current, previous)


def _forward_fake(x, weight, bias, state, rows, ids, activation, keys, width, query_length, eps, eps_on_length):
    batch, length, channels = x.shape
    sequences = batch if rows is None else rows.shape[0]
    q, k, v = (x.new_empty(batch, length, columns) for columns in (keys, keys, channels - 2 * keys))
    return q, k, v, x.new_empty(sequences, weight.shape[1] - 1, channels)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    rows: Tensor | None,
    ids: Tensor | None,
    activation: str,
    keys: int,
    width: int,
    query_length: float,
    eps: float,
    eps_on_length: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from kalmix.layers.fused.triton.convolution_launch import ConvolutionInputs, forward

    columns = QueryKeyColumns(keys, UnitNorm(width, query_length, eps, eps_on_length))
    return forward(ConvolutionInputs.of(x, weight, (bias, state, rows, ids), activation, columns))


def _backward_fake(
    x, weight, bias, state, rows, ids, dq, dk, dv, dfinal, activation, keys, width, query_length, eps, eps_on_length
):
    return tuple(x.new_empty(0) if y is None else y.new_empty(y.shape) for y in (x, weight, bias, state))


def _backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    rows: Tensor | None,
    ids: Tensor | None,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dfinal: Tensor | None,
    activation: str,
    keys: int,
    width: int,
    query_length: float,
    eps: float,
    eps_on_length: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from kalmix.layers.fused.triton.convolution_launch import ConvolutionInputs, backward

    columns = QueryKeyColumns(keys, UnitNorm(width, query_length, eps, eps_on_length))
    inputs = ConvolutionInputs.of(x, weight, (bias, state, rows, ids), activation, columns)
    return backward(inputs, (dq, dk, dv), dfinal)


_convolution_op = custom_op("kalmix::short_convolution", with_launch_cache(_forward), _forward_fake)
_convolution_backward = without_dispatcher(
    custom_op("kalmix::short_convolution_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    found = _convolution_backward(*saved, *grads, *ctx.options)
    return *(None if x is None else y for x, y in zip(saved[:4], found, strict=True)), *[None] * 8


def _differentiable_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, rows, ids = ctx.saved_tensors
    packing = None if rows is None else Packing(segments_without_checks(rows), ids)
    activation = None if ctx.options[0] == "none" else ctx.options[0]
    columns = QueryKeyColumns(ctx.options[1], UnitNorm(*ctx.options[2:]))

    def function(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> tuple[Tensor, ...]:
        return _eager_qkv(x, weight, bias, state, packing, activation, columns)

    return *differentiate(function, inputs, grads), *[None] * 8


_convolution = register_gradients(_convolution_op, _setup, _gradients, _differentiable_gradients)
