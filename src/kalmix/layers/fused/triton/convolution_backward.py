"""Backward pass of the short convolution; see `convolution.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.layers.fused.triton.activation import activation_and_slope
from kalmix.layers.fused.triton.convolution import (
    UNSPECIALIZED,
    are_in_sequence,
    choose,
    convolve,
    load_history,
    load_offset,
    load_parameters,
    load_sequence,
    load_sequences,
    load_tap,
    load_token,
    load_tokens,
    load_window,
    locate_block,
    locate_sequence,
    start_sequence,
    sum_head,
)
from kalmix.layers.fused.triton.unit_norm import inverse_length


@triton.jit
def _convolution_gradient(
    out, grad, scale, eps, KIND: tl.constexpr, P: tl.constexpr, ON_LENGTH: tl.constexpr, PTX: tl.constexpr
):
    """Return the gradient of a token's convolution, from the gradient of its output."""
    value, slope = activation_and_slope(out, KIND, PTX)
    if P > 0:
        inverse, factor = inverse_length(sum_head(value * value, P), eps, ON_LENGTH)
        along = sum_head(value * grad, P)
        grad = (scale * inverse) * grad - (scale * inverse * factor * (inverse * along)) * value
    return grad * slope


@triton.jit
def _within(x, same, PACKED: tl.constexpr):
    """Return x, or zeros if packed tokens are not of the same sequence."""
    if PACKED:
        x = tl.where(same, x, 0.0)
    return x


@triton.jit
def _compute_token(
    index, value, grad, sequence, id1, id2, id3, one, two, three, grad1, grad2, grad3, sums, dx, first, last,
    channel, inside, parameters, scale, eps,
    C: tl.constexpr, S: tl.constexpr, P: tl.constexpr, ON_LENGTH: tl.constexpr, KIND: tl.constexpr, SUM: tl.constexpr,
    PACKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Pass the output gradient of a token on to the inputs; store the gradient that it completes.

    That is the gradient of token `index` - (S - 1), stored if `index` lies between `first` and `last`. Returns the
    incomplete gradients of the last three inputs and, with `SUM`, the sums of the gradients of bias and weights.
    """
    tap0, tap1, tap2, tap3, offset = parameters
    doffset, dtap0, dtap1, dtap2, dtap3 = sums
    out = convolve(value, one, two, three, tap0, tap1, tap2, tap3, offset, S)
    grad = _convolution_gradient(out, grad.to(tl.float32), scale, eps, KIND, P, ON_LENGTH, PTX)
    grad = _within(grad, sequence >= 0, PACKED)
    if SUM:
        doffset, dtap0 = doffset + grad, dtap0 + grad * value
        dtap1, dtap2, dtap3 = dtap1 + grad * one, dtap2 + grad * two, dtap3 + grad * three
    complete = tap0 * grad
    if S > 1:
        complete, grad1 = grad1 + _within(tap1 * grad, sequence == id1, PACKED), complete
    if S > 2:
        complete, grad2 = grad2 + _within(tap2 * grad, sequence == id2, PACKED), complete
    if S > 3:
        complete, grad3 = grad3 + _within(tap3 * grad, sequence == id3, PACKED), complete
    mask = inside & (index >= first) & (index < last)
    tl.store(dx + ((index - (S - 1)) * C + channel), complete.to(dx.dtype.element_ty), mask=mask)
    return grad1, grad2, grad3, doffset, dtap0, dtap1, dtap2, dtap3


@triton.jit
def _compute_tokens(
    values, grads, sequences, id1, id2, id3, one, two, three, grad1, grad2, grad3, sums, dx, first, last,
    channel, inside, parameters, scale, eps,
    C: tl.constexpr, S: tl.constexpr, P: tl.constexpr, ON_LENGTH: tl.constexpr, KIND: tl.constexpr, SUM: tl.constexpr,
    PACKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Call `_compute_token` for some tokens; return the last three inputs, and its results.

    The inputs of a sequence that starts at one of these tokens are wrong. So there is none or, without `SUM`, the
    tokens follow all those whose gradients are stored: such a sequence does not contribute to them.
    """
    doffset, dtap0, dtap1, dtap2, dtap3 = sums
    for i in tl.static_range(len(values)):
        value = values[i].to(tl.float32)
        grad1, grad2, grad3, doffset, dtap0, dtap1, dtap2, dtap3 = _compute_token(
            i, value, grads[i], sequences[i], id1, id2, id3, one, two, three, grad1, grad2, grad3,
            (doffset, dtap0, dtap1, dtap2, dtap3), dx, first, last, channel, inside, parameters, scale, eps,
            C, S, P, ON_LENGTH, KIND, SUM, PACKED, PTX,
        )  # fmt: skip
        one, two, three = value, one, two
        if PACKED:
            id1, id2, id3 = sequences[i], id1, id2
    return one, two, three, grad1, grad2, grad3, doffset, dtap0, dtap1, dtap2, dtap3


@triton.jit
def _slide(
    x, state, ids, dy, dx, row, first, end, length, stride, column, channel, inside, window, parameters, scale, eps,
    C: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, ON_LENGTH: tl.constexpr,
    UNROLL: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute and store the gradients of a chunk of inputs; return the sums of those of bias and weights.

    The loops are those of the forward pass.
    """
    one, two, three = window
    dtap0, dtap1 = tl.zeros(channel.shape, tl.float32), tl.zeros(channel.shape, tl.float32)
    dtap2, dtap3 = tl.zeros(channel.shape, tl.float32), tl.zeros(channel.shape, tl.float32)
    doffset, grad1 = tl.zeros(channel.shape, tl.float32), tl.zeros(channel.shape, tl.float32)
    grad2, grad3 = tl.zeros(channel.shape, tl.float32), tl.zeros(channel.shape, tl.float32)
    id1 = load_sequence(ids, first, length, PACKED)  # no aliases: Triton would not carry them
    id2, id3 = load_sequence(ids, first, length, PACKED), load_sequence(ids, first, length, PACKED)
    dy += row.to(tl.int64) * length * WIDTH
    dx += row.to(tl.int64) * length * C
    for start in range(first, end, UNROLL):
        values = load_tokens(x, start, length, stride, channel, inside, UNROLL)
        grads = load_tokens(dy, start, length, WIDTH, column, inside, UNROLL)
        sequences = load_sequences(ids, start, length, UNROLL, PACKED)
        at = dx + tl.cast(start, tl.int64) * C
        least, most = first - start + S - 1, end - start + S - 1
        if PACKED:
            if are_in_sequence(id1, sequences) & (id2 == id1) & (id3 == id1):
                one, two, three, grad1, grad2, grad3, doffset, dtap0, dtap1, dtap2, dtap3 = _compute_tokens(
                    values, grads, sequences, id1, id2, id3, one, two, three, grad1, grad2, grad3,
                    (doffset, dtap0, dtap1, dtap2, dtap3), at, least, most, channel, inside, parameters, scale, eps,
                    C, S, P, ON_LENGTH, KIND, True, False, PTX,
                )  # fmt: skip
            else:
                for i in range(UNROLL):
                    sequence = load_sequence(ids, start + i, length, PACKED)
                    value = load_token(x, start + i, length, stride, channel, inside).to(tl.float32)
                    grad = load_token(dy, start + i, length, WIDTH, column, inside)
                    value, one, two, three = start_sequence(
                        state, sequence, sequence != id1, value, one, two, three, channel, inside, C, S, STATE
                    )
                    grad1, grad2, grad3, doffset, dtap0, dtap1, dtap2, dtap3 = _compute_token(
                        i, value, grad, sequence, id1, id2, id3, one, two, three, grad1, grad2, grad3,
                        (doffset, dtap0, dtap1, dtap2, dtap3), at, least, most, channel, inside, parameters, scale, eps,
                        C, S, P, ON_LENGTH, KIND, True, True, PTX,
                    )  # fmt: skip
                    one, two, three, id1, id2, id3 = value, one, two, sequence, id1, id2
        else:
            one, two, three, grad1, grad2, grad3, doffset, dtap0, dtap1, dtap2, dtap3 = _compute_tokens(
                values, grads, sequences, id1, id2, id3, one, two, three, grad1, grad2, grad3,
                (doffset, dtap0, dtap1, dtap2, dtap3), at, least, most, channel, inside, parameters, scale, eps,
                C, S, P, ON_LENGTH, KIND, True, False, PTX,
            )  # fmt: skip
    if S > 1:  # the S - 1 tokens after the chunk complete the gradients of its last inputs
        after = first + (end - first + UNROLL - 1) // UNROLL * UNROLL
        values = load_tokens(x, after, length, stride, channel, inside, S - 1)
        grads = load_tokens(dy, after, length, WIDTH, column, inside, S - 1)
        sequences = load_sequences(ids, after, length, S - 1, PACKED)
        _compute_tokens(
            values, grads, sequences, id1, id2, id3, one, two, three, grad1, grad2, grad3,
            (doffset, dtap0, dtap1, dtap2, dtap3), dx + tl.cast(after, tl.int64) * C, first - after + S - 1,
            end - after + S - 1, channel, inside, parameters, scale, eps, C, S, P, ON_LENGTH, KIND, False, PACKED, PTX,
        )  # fmt: skip
    return doffset, dtap0, dtap1, dtap2, dtap3


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_kernel(
    x, weight, bias, state, rows, ids, dq, dk, dv, dx, weight_partial, bias_partial, length, chunk,
    batch_stride, stride, query_length, eps,
    C: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    ON_LENGTH: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, UNROLL: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a chunk's inputs, and add up those of weight and bias over its tokens.

    The program recomputes the convolution, also for the S - 1 tokens after the chunk. It holds the incomplete gradients
    of the last S - 1 inputs.
    """
    row = tl.program_id(1)
    section, column, inside = locate_block(tl.program_id(0) % BLOCKS, C, KEYS, K, P, BLOCK)
    channel = section * KEYS + column
    index = tl.program_id(0) // BLOCKS
    first = index * chunk
    end = tl.minimum(first + chunk, length)
    x += row.to(tl.int64) * batch_stride
    ids += row.to(tl.int64) * length
    partial = (row * (tl.num_programs(0) // BLOCKS) + index).to(tl.int64) * C
    weight_partial += partial * S
    bias_partial += partial
    parameters = load_parameters(weight, bias, channel, inside, S, BIAS)
    window = load_window(x, state, rows, ids, row, first, length, stride, channel, inside, C, S, PACKED, STATE)
    if section < 2:
        scale = choose(section, query_length, 1.0, 1.0, KEYS)
        doffset, dtap0, dtap1, dtap2, dtap3 = _slide(
            x, state, ids, choose(section, dq, dk, dv, KEYS), dx, row, first, end, length, stride, column, channel,
            inside, window, parameters, scale, eps, C, S, KEYS, P, ON_LENGTH, UNROLL, KIND, PACKED, STATE, PTX,
        )  # fmt: skip
    else:
        doffset, dtap0, dtap1, dtap2, dtap3 = _slide(
            x, state, ids, dv, dx, row, first, end, length, stride, column, channel,
            inside, window, parameters, 1.0, eps, C, S, C - 2 * KEYS, 0, ON_LENGTH, UNROLL, KIND, PACKED, STATE, PTX,
        )  # fmt: skip
    if BIAS:
        tl.store(bias_partial + channel, doffset, mask=inside)
    tl.store(weight_partial + channel * S + S - 1, dtap0, mask=inside)
    if S > 1:
        tl.store(weight_partial + channel * S + S - 2, dtap1, mask=inside)
    if S > 2:
        tl.store(weight_partial + channel * S + S - 3, dtap2, mask=inside)
    if S > 3:
        tl.store(weight_partial + channel * S + S - 4, dtap3, mask=inside)


@triton.jit(do_not_specialize=["length"])
def state_backward_kernel(
    x, weight, bias, state, rows, dq, dk, dv, dfinal, dx, dstate, length, batch_stride, stride, query_length, eps,
    C: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    ON_LENGTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a state; with `FINAL`, also add that of the final state to the gradient of the inputs."""
    sequence = tl.program_id(0)
    section, column, inside = locate_block(tl.program_id(1), C, KEYS, K, P, BLOCK)
    channel, width = section * KEYS + column, choose(section, KEYS, KEYS, C - 2 * KEYS, KEYS)
    row, start, count = locate_sequence(rows, sequence, length, PACKED)
    x += row * batch_stride
    dy = choose(section, dq, dk, dv, KEYS) + row * length * width
    dx += row * length * C
    offset = load_offset(bias, channel, inside, BIAS)
    scale = choose(section, query_length, 1.0, 1.0, KEYS)
    states = sequence.to(tl.int64) * (S - 1)
    if STATE:
        for i in tl.static_range(S - 1):
            total = tl.zeros((BLOCK,), tl.float32)
            for token in tl.static_range(i + 1):  # entry i of the history is an input of the first i + 1 tokens
                out = offset
                for j in tl.static_range(S):
                    entry = load_history(
                        x, state, sequence, start, count, token + j, stride, channel, inside, C, S, STATE
                    )
                    out += load_tap(weight, channel, inside, S - 1 - j, S) * entry
                dout = load_token(dy, start + token, start + count, width, column, inside).to(tl.float32)
                grad = _convolution_gradient(out, dout, scale, eps, KIND, 0, ON_LENGTH, PTX)
                if P > 0:
                    scaled = _convolution_gradient(out, dout, scale, eps, KIND, P, ON_LENGTH, PTX)
                    grad = tl.where(section < 2, scaled, grad)
                total += tl.where(token < count, load_tap(weight, channel, inside, S - 1 - i + token, S) * grad, 0.0)
            if FINAL:
                at = dfinal + (states + i - count) * C + channel
                total += tl.load(at, mask=inside & (i >= count), other=0.0).to(tl.float32)
            tl.store(dstate + (states + i) * C + channel, total.to(dstate.dtype.element_ty), mask=inside)
    if FINAL:
        for i in tl.static_range(S - 1):
            token = count - (S - 1) + i
            at = dx + tl.cast(start + token, tl.int64) * C + channel
            mask = inside & (token >= 0)
            grad = tl.load(dfinal + (states + i) * C + channel, mask=mask, other=0.0).to(tl.float32)
            grad += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, grad.to(dx.dtype.element_ty), mask=mask)
