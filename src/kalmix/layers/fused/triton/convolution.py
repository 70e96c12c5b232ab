"""Short causal convolution: one program slides along a chunk of tokens and holds the last inputs in registers.

A tensor is read once per pass, except for the few tokens around a chunk. Where a sequence starts, the program replaces
the inputs that it holds by the state of the sequence. Tap j multiplies the input j tokens earlier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.layers.fused.triton.activation import activation_and_slope

UNSPECIALIZED = ["length", "chunk", "blocks"]


@triton.jit
def _load_tap(weight, channel, TAP: tl.constexpr, C: tl.constexpr, S: tl.constexpr):
    """Load the weights of a tap; zeros if it does not exist."""
    if TAP < S:
        tap = tl.load(weight + channel * S + (S - 1 - TAP), mask=channel < C, other=0.0).to(tl.float32)
    else:
        tap = tl.zeros(channel.shape, tl.float32)
    return tap


@triton.jit
def _load_parameters(weight, bias, channel, C: tl.constexpr, S: tl.constexpr, BIAS: tl.constexpr):
    """Load four taps and the bias."""
    offset = tl.zeros(channel.shape, tl.float32)
    if BIAS:
        offset = tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    tap0, tap1 = _load_tap(weight, channel, 0, C, S), _load_tap(weight, channel, 1, C, S)
    return tap0, tap1, _load_tap(weight, channel, 2, C, S), _load_tap(weight, channel, 3, C, S), offset


@triton.jit
def _load_token(x, token, length, stride, channel, C: tl.constexpr):
    """Load a token of a batch row; zeros outside the row."""
    mask = (channel < C) & (token >= 0) & (token < length)
    return tl.load(x + tl.cast(token, tl.int64) * stride + channel, mask=mask, other=0.0)


@triton.jit
def _load_sequence(ids, token, length, PACKED: tl.constexpr):
    """Return the sequence of a token, -1 for none; without packing 0 for every token of the batch row."""
    inside = (token >= 0) & (token < length)
    sequence = tl.where(inside, 0, -1)
    if PACKED:
        sequence = tl.load(ids + token, mask=inside, other=-1).to(tl.int32)
    return sequence


@triton.jit
def _load_state(state, sequence, index, wanted, channel, C: tl.constexpr, S: tl.constexpr, STATE: tl.constexpr):
    """Load one of the S - 1 inputs in the state of a sequence; zeros without state, or if it is not wanted."""
    if STATE:
        at = state + (tl.cast(sequence, tl.int64) * (S - 1) + index) * C + channel
        value = tl.load(at, mask=(channel < C) & wanted, other=0.0).to(tl.float32)
    else:
        value = tl.zeros(channel.shape, tl.float32)
    return value


@triton.jit
def _load_earlier(
    x, state, sequence, start, token, length, stride, channel,
    TAP: tl.constexpr, C: tl.constexpr, S: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Load the input `TAP` tokens before a token of a sequence, from the batch row or from the state."""
    value = tl.zeros(channel.shape, tl.float32)
    if TAP < S:
        source = token - TAP
        inside = source >= start
        value = _load_token(x, tl.where(inside, source, -1), length, stride, channel, C).to(tl.float32)
        wanted = (inside == 0) & (token >= start)
        value += _load_state(state, sequence, S - 1 + source - start, wanted, channel, C, S, STATE)
    return value


@triton.jit
def _load_window(
    x, state, rows, ids, row, token, length, stride, channel,
    C: tl.constexpr, S: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Load the three inputs before a token; zeros for taps that do not exist, and for a token of no sequence."""
    sequence, start = row, 0
    if PACKED:
        sequence = _load_sequence(ids, token, length, PACKED)
        start = tl.load(rows + sequence * 3 + 1, mask=sequence >= 0, other=2147483647)
    one = _load_earlier(x, state, sequence, start, token, length, stride, channel, 1, C, S, STATE)
    two = _load_earlier(x, state, sequence, start, token, length, stride, channel, 2, C, S, STATE)
    three = _load_earlier(x, state, sequence, start, token, length, stride, channel, 3, C, S, STATE)
    return one, two, three


@triton.jit
def _start_sequence(
    state, sequence, starts, value, one, two, three, channel, C: tl.constexpr, S: tl.constexpr, STATE: tl.constexpr
):
    """Replace the three earlier inputs by the state if a sequence starts; replace a token of no sequence by zeros."""
    wanted = starts & (sequence >= 0)
    if S > 1:
        one = tl.where(starts, _load_state(state, sequence, S - 2, wanted, channel, C, S, STATE), one)
    if S > 2:
        two = tl.where(starts, _load_state(state, sequence, S - 3, wanted, channel, C, S, STATE), two)
    if S > 3:
        three = tl.where(starts, _load_state(state, sequence, S - 4, wanted, channel, C, S, STATE), three)
    return tl.where(sequence >= 0, value, 0.0), one, two, three


@triton.jit
def _convolve(value, one, two, three, tap0, tap1, tap2, tap3, offset, S: tl.constexpr):
    out = offset + tap0 * value
    if S > 1:
        out += tap1 * one
    if S > 2:
        out += tap2 * two
    if S > 3:
        out += tap3 * three
    return out


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    x, weight, bias, state, rows, ids, y, length, chunk, blocks, batch_stride, stride,
    C: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Compute a chunk of one batch row."""
    row = tl.program_id(1)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(0) // blocks * chunk
    x += row.to(tl.int64) * batch_stride
    y += row.to(tl.int64) * length * C
    ids += row.to(tl.int64) * length
    tap0, tap1, tap2, tap3, offset = _load_parameters(weight, bias, channel, C, S, BIAS)
    one, two, three = _load_window(x, state, rows, ids, row, first, length, stride, channel, C, S, PACKED, STATE)
    next_value = _load_token(x, first, length, stride, channel, C)  # loads run two tokens ahead
    later_value = _load_token(x, first + 1, length, stride, channel, C)
    next_id = _load_sequence(ids, first, length, PACKED)
    later_id = _load_sequence(ids, first + 1, length, PACKED)
    previous = _load_sequence(ids, first, length, PACKED)  # no alias of `next_id`: Triton would not carry it
    for token in range(first, tl.minimum(first + chunk, length)):
        value, sequence = next_value.to(tl.float32), next_id
        next_value, next_id = later_value, later_id
        later_value = _load_token(x, token + 2, length, stride, channel, C)
        later_id = _load_sequence(ids, token + 2, length, PACKED)
        if PACKED:
            value, one, two, three = _start_sequence(
                state, sequence, sequence != previous, value, one, two, three, channel, C, S, STATE
            )
        out = _convolve(value, one, two, three, tap0, tap1, tap2, tap3, offset, S)
        out, _ = activation_and_slope(out, KIND)
        if PACKED:
            out = tl.where(sequence >= 0, out, 0.0)
        tl.store(y + tl.cast(token, tl.int64) * C + channel, out.to(y.dtype.element_ty), mask=channel < C)
        one, two, three, previous = value, one, two, sequence


@triton.jit
def _within(x, same, PACKED: tl.constexpr):
    """Return x, or zeros if packed tokens are not of the same sequence."""
    if PACKED:
        x = tl.where(same, x, 0.0)
    return x


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_kernel(
    x, weight, bias, state, rows, ids, dy, dx, weight_partial, bias_partial, length, chunk, blocks,
    batch_stride, stride,
    C: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a chunk's inputs, and add up those of weight and bias over its tokens.

    The program recomputes the convolution, also for the S - 1 tokens after the chunk, and holds the unfinished
    gradients of the last S - 1 inputs.
    """
    row = tl.program_id(1)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    index = tl.program_id(0) // blocks
    first = index * chunk
    end = tl.minimum(first + chunk, length)
    x += row.to(tl.int64) * batch_stride
    dy += row.to(tl.int64) * length * C
    dx += row.to(tl.int64) * length * C
    ids += row.to(tl.int64) * length
    tap0, tap1, tap2, tap3, offset = _load_parameters(weight, bias, channel, C, S, BIAS)
    one, two, three = _load_window(x, state, rows, ids, row, first, length, stride, channel, C, S, PACKED, STATE)
    dtap0, dtap1 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    dtap2, dtap3 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    doffset, grad1 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    grad2, grad3 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    next_value = _load_token(x, first, length, stride, channel, C)  # loads run two tokens ahead
    later_value = _load_token(x, first + 1, length, stride, channel, C)
    next_grad = _load_token(dy, first, length, C, channel, C)
    later_grad = _load_token(dy, first + 1, length, C, channel, C)
    next_id = _load_sequence(ids, first, length, PACKED)
    later_id = _load_sequence(ids, first + 1, length, PACKED)
    id1 = _load_sequence(ids, first, length, PACKED)  # no aliases of `next_id`: Triton would not carry them
    id2, id3 = _load_sequence(ids, first, length, PACKED), _load_sequence(ids, first, length, PACKED)
    for token in range(first, end + S - 1):
        value, grad, sequence = next_value.to(tl.float32), next_grad.to(tl.float32), next_id
        next_value, next_grad, next_id = later_value, later_grad, later_id
        later_value = _load_token(x, token + 2, length, stride, channel, C)
        later_grad = _load_token(dy, token + 2, length, C, channel, C)
        later_id = _load_sequence(ids, token + 2, length, PACKED)
        if PACKED:
            value, one, two, three = _start_sequence(
                state, sequence, sequence != id1, value, one, two, three, channel, C, S, STATE
            )
        out = _convolve(value, one, two, three, tap0, tap1, tap2, tap3, offset, S)
        _, slope = activation_and_slope(out, KIND)
        grad = tl.where(sequence >= 0, grad * slope, 0.0)
        own = tl.where(token < end, grad, 0.0)
        doffset += own
        dtap0 += own * value
        finished = tap0 * grad
        if S > 1:
            dtap1 += own * one
            finished, grad1 = grad1 + _within(tap1 * grad, sequence == id1, PACKED), finished
        if S > 2:
            dtap2 += own * two
            finished, grad2 = grad2 + _within(tap2 * grad, sequence == id2, PACKED), finished
        if S > 3:
            dtap3 += own * three
            finished, grad3 = grad3 + _within(tap3 * grad, sequence == id3, PACKED), finished
        at = token - (S - 1)
        mask = (channel < C) & (at >= first)
        tl.store(dx + tl.cast(at, tl.int64) * C + channel, finished.to(dx.dtype.element_ty), mask=mask)
        one, two, three, id1, id2, id3 = value, one, two, sequence, id1, id2
    partial = (row * (tl.num_programs(0) // blocks) + index).to(tl.int64) * C + channel
    if BIAS:
        tl.store(bias_partial + partial, doffset, mask=channel < C)
    tl.store(weight_partial + partial * S + S - 1, dtap0, mask=channel < C)
    if S > 1:
        tl.store(weight_partial + partial * S + S - 2, dtap1, mask=channel < C)
    if S > 2:
        tl.store(weight_partial + partial * S + S - 3, dtap2, mask=channel < C)
    if S > 3:
        tl.store(weight_partial + partial * S + S - 4, dtap3, mask=channel < C)


@triton.jit
def _locate_sequence(rows, sequence, length, PACKED: tl.constexpr):
    """Return the batch row, the first token and the number of tokens of a sequence."""
    row, start, count = sequence, 0, length
    if PACKED:
        row, start = tl.load(rows + sequence * 3), tl.load(rows + sequence * 3 + 1)
        count = tl.load(rows + sequence * 3 + 2) - start
    return tl.cast(row, tl.int64), start, count


@triton.jit
def _load_history(
    x, state, sequence, start, count, index, stride, channel, C: tl.constexpr, S: tl.constexpr, STATE: tl.constexpr
):
    """Load an entry of a sequence's history: the S - 1 inputs of its state, then its tokens."""
    token = index - (S - 1)
    value = _load_token(x, tl.where(token >= 0, start + token, -1), start + count, stride, channel, C).to(tl.float32)
    return value + _load_state(state, sequence, index, token < 0, channel, C, S, STATE)


@triton.jit(do_not_specialize=["length"])
def final_state_kernel(
    x, state, rows, final, length, batch_stride, stride,
    C: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Copy the last S - 1 inputs of a sequence."""
    sequence, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, start, count = _locate_sequence(rows, sequence, length, PACKED)
    x += row * batch_stride
    for i in tl.static_range(S - 1):
        value = _load_history(x, state, sequence, start, count, count + i, stride, channel, C, S, STATE)
        at = final + (sequence.to(tl.int64) * (S - 1) + i) * C + channel
        tl.store(at, value.to(final.dtype.element_ty), mask=channel < C)


@triton.jit(do_not_specialize=["length"])
def state_backward_kernel(
    x, weight, bias, state, rows, dy, dfinal, dx, dstate, length, batch_stride, stride,
    C: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a state; with `FINAL`, also add that of the final state to the gradient of the inputs."""
    sequence, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, start, count = _locate_sequence(rows, sequence, length, PACKED)
    x += row * batch_stride
    dy += row * length * C
    dx += row * length * C
    offset = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        offset = tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    states = sequence.to(tl.int64) * (S - 1)
    if STATE:
        for i in tl.static_range(S - 1):
            total = tl.zeros((BLOCK,), tl.float32)
            for token in tl.static_range(i + 1):  # entry i of the history is an input of the first i + 1 tokens
                out = offset
                for j in tl.static_range(S):
                    value = _load_history(x, state, sequence, start, count, token + j, stride, channel, C, S, STATE)
                    out += _load_tap(weight, channel, S - 1 - j, C, S) * value
                _, slope = activation_and_slope(out, KIND)
                grad = _load_token(dy, start + token, start + count, C, channel, C).to(tl.float32) * slope
                total += tl.where(token < count, _load_tap(weight, channel, S - 1 - i + token, C, S) * grad, 0.0)
            if FINAL:
                at = dfinal + (states + i - count) * C + channel
                total += tl.load(at, mask=(channel < C) & (i >= count), other=0.0).to(tl.float32)
            tl.store(dstate + (states + i) * C + channel, total.to(dstate.dtype.element_ty), mask=channel < C)
    if FINAL:
        for i in tl.static_range(S - 1):
            token = count - (S - 1) + i
            at = dx + tl.cast(start + token, tl.int64) * C + channel
            mask = (channel < C) & (token >= 0)
            grad = tl.load(dfinal + (states + i) * C + channel, mask=mask, other=0.0).to(tl.float32)
            grad += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, grad.to(dx.dtype.element_ty), mask=mask)
