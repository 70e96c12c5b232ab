"""Short causal convolution: one program slides along a chunk of tokens and holds the last inputs in registers.

A tensor is read once per pass, except for the few tokens around a chunk. Where a sequence starts, the program replaces
the inputs that it holds by the state of the sequence. Tap j multiplies the input j tokens earlier.

The channels are queries, keys and values, stored in three tensors; a convolution of one tensor has values only. A
program has channels of one of the three. It may scale queries and keys to unit length, in heads of K columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.layers.fused.triton.activation import activation_and_slope
from kalmix.layers.fused.triton.unit_norm import inverse_length

UNSPECIALIZED = ["length", "chunk"]


@triton.jit
def load_tap(weight, channel, inside, TAP: tl.constexpr, S: tl.constexpr):
    """Load the weights of a tap; zeros if it does not exist."""
    if TAP < S:
        tap = tl.load(weight + channel * S + (S - 1 - TAP), mask=inside, other=0.0).to(tl.float32)
    else:
        tap = tl.zeros(channel.shape, tl.float32)
    return tap


@triton.jit
def load_offset(bias, channel, inside, BIAS: tl.constexpr):
    """Load the bias; zeros if there is none."""
    if BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        offset = tl.zeros(channel.shape, tl.float32)
    return offset


@triton.jit
def load_parameters(weight, bias, channel, inside, S: tl.constexpr, BIAS: tl.constexpr):
    """Load four taps and the bias."""
    tap0, tap1 = load_tap(weight, channel, inside, 0, S), load_tap(weight, channel, inside, 1, S)
    tap2, tap3 = load_tap(weight, channel, inside, 2, S), load_tap(weight, channel, inside, 3, S)
    return tap0, tap1, tap2, tap3, load_offset(bias, channel, inside, BIAS)


@triton.jit
def load_token(x, token, length, stride, channel, inside):
    """Load a token of a batch row; zeros outside the row."""
    mask = inside & (token >= 0) & (token < length)
    return tl.load(x + tl.cast(token, tl.int64) * stride + channel, mask=mask, other=0.0)


@triton.jit
def load_tokens(x, token, length, stride, channel, inside, COUNT: tl.constexpr):
    """Load `COUNT` tokens, all at the same time."""
    values, at = (), x + tl.cast(token, tl.int64) * stride + channel
    for i in tl.static_range(COUNT):
        values += (tl.load(at, mask=inside & (token + i < length), other=0.0),)
        at += stride
    return values


@triton.jit
def load_sequence(ids, token, length, PACKED: tl.constexpr):
    """Return the sequence of a token, -1 for none; without packing 0 for every token of the batch row."""
    if PACKED:
        sequence = tl.load(ids + token, mask=(token >= 0) & (token < length), other=-1).to(tl.int32)
    else:
        sequence = tl.where((token >= 0) & (token < length), 0, -1)
    return sequence


@triton.jit
def load_sequences(ids, token, length, COUNT: tl.constexpr, PACKED: tl.constexpr):
    """Return the sequences of `COUNT` tokens."""
    values = ()
    for i in tl.static_range(COUNT):
        values += (load_sequence(ids, token + i, length, PACKED),)
    return values


@triton.jit
def load_state(state, sequence, index, wanted, channel, inside, C: tl.constexpr, S: tl.constexpr, STATE: tl.constexpr):
    """Load one of the S - 1 inputs in the state of a sequence; zeros without state, or if it is not wanted."""
    if STATE:
        at = state + (tl.cast(sequence, tl.int64) * (S - 1) + index) * C + channel
        value = tl.load(at, mask=inside & wanted, other=0.0).to(tl.float32)
    else:
        value = tl.zeros(channel.shape, tl.float32)
    return value


@triton.jit
def _load_earlier(
    x, state, sequence, start, token, length, stride, channel, inside,
    TAP: tl.constexpr, C: tl.constexpr, S: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Load the input `TAP` tokens before a token of a sequence, from the batch row or from the state."""
    value = tl.zeros(channel.shape, tl.float32)
    if TAP < S:
        source = token - TAP
        within = source >= start
        value = load_token(x, tl.where(within, source, -1), length, stride, channel, inside).to(tl.float32)
        wanted = (within == 0) & (token >= start)
        value += load_state(state, sequence, S - 1 + source - start, wanted, channel, inside, C, S, STATE)
    return value


@triton.jit
def load_window(
    x, state, rows, ids, row, token, length, stride, channel, inside,
    C: tl.constexpr, S: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Load the three inputs before a token; zeros for taps that do not exist, and for a token of no sequence."""
    sequence, start = row, 0
    if PACKED:
        sequence = load_sequence(ids, token, length, PACKED)
        start = tl.load(rows + sequence * 3 + 1, mask=sequence >= 0, other=2147483647)
    one = _load_earlier(x, state, sequence, start, token, length, stride, channel, inside, 1, C, S, STATE)
    two = _load_earlier(x, state, sequence, start, token, length, stride, channel, inside, 2, C, S, STATE)
    three = _load_earlier(x, state, sequence, start, token, length, stride, channel, inside, 3, C, S, STATE)
    return one, two, three


@triton.jit
def start_sequence(
    state, sequence, starts, value, one, two, three, channel, inside,
    C: tl.constexpr, S: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Replace the three earlier inputs by the state if a sequence starts; replace a token of no sequence by zeros."""
    wanted = starts & (sequence >= 0)
    if S > 1:
        one = tl.where(starts, load_state(state, sequence, S - 2, wanted, channel, inside, C, S, STATE), one)
    if S > 2:
        two = tl.where(starts, load_state(state, sequence, S - 3, wanted, channel, inside, C, S, STATE), two)
    if S > 3:
        three = tl.where(starts, load_state(state, sequence, S - 4, wanted, channel, inside, C, S, STATE), three)
    return tl.where(sequence >= 0, value, 0.0), one, two, three


@triton.jit
def convolve(value, one, two, three, tap0, tap1, tap2, tap3, offset, S: tl.constexpr):
    """Return the convolution at one token."""
    out = offset + tap0 * value
    if S > 1:
        out += tap1 * one
    if S > 2:
        out += tap2 * two
    if S > 3:
        out += tap3 * three
    return out


@triton.jit
def locate_block(block, C: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """Return whose columns a block has (0 for queries, 1 for keys, 2 for values), those columns, and which exist.

    With K > 0, a block of queries or keys has whole heads of K columns, each padded to P.
    """
    heads: tl.constexpr = BLOCK // max(P, 1)
    count: tl.constexpr = heads * K if K > 0 else BLOCK  # columns of queries or keys that a block has
    blocks: tl.constexpr = (KEYS + count - 1) // count
    index, section = tl.arange(0, BLOCK), 2
    if KEYS > 0:
        section = tl.minimum(block // blocks, 2)
    column = (block - 2 * blocks) * BLOCK + index
    inside = column < C - 2 * KEYS
    if KEYS > 0:
        first = (block - section * blocks) * count
        if P > K:
            key_column = first + (index // P * K + index % P)
            key_inside = (index % P < K) & (key_column < KEYS)
        else:
            key_column = first + index
            key_inside = key_column < KEYS
        column, inside = tl.where(section < 2, key_column, column), tl.where(section < 2, key_inside, inside)
    return section, column, inside


@triton.jit
def choose(section, q, k, v, KEYS: tl.constexpr):
    """Return one of three tensors or numbers."""
    chosen = v
    if KEYS > 0:
        chosen = tl.where(section == 0, q, tl.where(section == 1, k, v))
    return chosen


@triton.jit
def sum_head(x, P: tl.constexpr):
    """Return, for each column, the sum over the P columns of its head."""
    shape: tl.constexpr = (x.shape[0] // P, P)
    total = tl.sum(tl.reshape(x, shape), axis=1)
    return tl.reshape(tl.broadcast_to(total[:, None], shape), (x.shape[0],))


@triton.jit
def are_in_sequence(sequence, sequences):
    """Return whether all tokens, given their `sequences`, are in `sequence`; False if that is -1, for none."""
    same = sequence >= 0
    for i in tl.static_range(len(sequences)):
        same = same & (sequences[i] == sequence)
    return same


@triton.jit
def _compute_token(
    value, one, two, three, parameters, scale, eps,
    S: tl.constexpr, P: tl.constexpr, ON_LENGTH: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the output at a token."""
    tap0, tap1, tap2, tap3, offset = parameters
    out = convolve(value, one, two, three, tap0, tap1, tap2, tap3, offset, S)
    out, _ = activation_and_slope(out, KIND, PTX)
    if P > 0:
        inverse, _ = inverse_length(sum_head(out * out, P), eps, ON_LENGTH)
        out = out * (scale * inverse)
    return out


@triton.jit
def _compute_tokens(
    values, one, two, three, y, left, column, inside, parameters, scale, eps,
    S: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, ON_LENGTH: tl.constexpr, KIND: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Compute and store the outputs at tokens of one sequence, `left` at most; return the last three inputs."""
    for i in tl.static_range(len(values)):
        value = values[i].to(tl.float32)
        out = _compute_token(value, one, two, three, parameters, scale, eps, S, P, ON_LENGTH, KIND, PTX)
        tl.store(y + (i * WIDTH + column), out.to(y.dtype.element_ty), mask=inside & (i < left))
        one, two, three = value, one, two
    return one, two, three


@triton.jit
def _slide(
    x, state, ids, y, row, first, end, length, stride, column, channel, inside, window, parameters, scale, eps,
    C: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, ON_LENGTH: tl.constexpr,
    UNROLL: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute a chunk of tokens, given the three inputs before it; with P > 0, scale heads of P columns to unit length.

    `UNROLL` tokens of one sequence are computed in an unrolled loop. Other tokens are computed one by one.
    """
    one, two, three = window
    previous = load_sequence(ids, first, length, PACKED)
    y += row.to(tl.int64) * length * WIDTH
    for start in range(first, end, UNROLL):
        values = load_tokens(x, start, length, stride, channel, inside, UNROLL)
        at, left = y + tl.cast(start, tl.int64) * WIDTH, end - start
        if PACKED:
            if are_in_sequence(previous, load_sequences(ids, start, length, UNROLL, PACKED)):
                one, two, three = _compute_tokens(
                    values, one, two, three, at, left, column, inside, parameters, scale, eps,
                    S, WIDTH, P, ON_LENGTH, KIND, PTX,
                )  # fmt: skip
            else:  # unrolled, this loop would take most of the time of compilation; it loads tokens from the L1 cache
                for i in range(UNROLL):
                    sequence = load_sequence(ids, start + i, length, PACKED)
                    value = load_token(x, start + i, length, stride, channel, inside).to(tl.float32)
                    value, one, two, three = start_sequence(
                        state, sequence, sequence != previous, value, one, two, three, channel, inside, C, S, STATE
                    )
                    out = _compute_token(value, one, two, three, parameters, scale, eps, S, P, ON_LENGTH, KIND, PTX)
                    out = tl.where(sequence >= 0, out, 0.0).to(y.dtype.element_ty)
                    tl.store(at + (i * WIDTH + column), out, mask=inside & (i < left))
                    previous, one, two, three = sequence, value, one, two
        else:
            one, two, three = _compute_tokens(
                values, one, two, three, at, left, column, inside, parameters, scale, eps,
                S, WIDTH, P, ON_LENGTH, KIND, PTX,
            )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    x, weight, bias, state, rows, ids, q, k, v, length, chunk, batch_stride, stride, query_length, eps,
    C: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    ON_LENGTH: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, UNROLL: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute a chunk of one batch row."""
    row = tl.program_id(1)
    section, column, inside = locate_block(tl.program_id(0) % BLOCKS, C, KEYS, K, P, BLOCK)
    channel = section * KEYS + column
    first = tl.program_id(0) // BLOCKS * chunk
    end = tl.minimum(first + chunk, length)
    x += row.to(tl.int64) * batch_stride
    ids += row.to(tl.int64) * length
    parameters = load_parameters(weight, bias, channel, inside, S, BIAS)
    window = load_window(x, state, rows, ids, row, first, length, stride, channel, inside, C, S, PACKED, STATE)
    if section < 2:
        scale = choose(section, query_length, 1.0, 1.0, KEYS)
        _slide(
            x, state, ids, choose(section, q, k, v, KEYS), row, first, end, length, stride, column, channel,
            inside, window, parameters, scale, eps, C, S, KEYS, P, ON_LENGTH, UNROLL, KIND, PACKED, STATE, PTX,
        )  # fmt: skip
    else:
        _slide(
            x, state, ids, v, row, first, end, length, stride, column, channel,
            inside, window, parameters, 1.0, eps, C, S, C - 2 * KEYS, 0, ON_LENGTH, UNROLL, KIND, PACKED, STATE, PTX,
        )  # fmt: skip


@triton.jit
def locate_sequence(rows, sequence, length, PACKED: tl.constexpr):
    """Return the batch row, the first token and the number of tokens of a sequence."""
    row, start, count = sequence, 0, length
    if PACKED:
        row, start = tl.load(rows + sequence * 3), tl.load(rows + sequence * 3 + 1)
        count = tl.load(rows + sequence * 3 + 2) - start
    return tl.cast(row, tl.int64), start, count


@triton.jit
def load_history(
    x, state, sequence, start, count, index, stride, channel, inside,
    C: tl.constexpr, S: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Load an entry of a sequence's history: the S - 1 inputs of its state, then its tokens."""
    token = index - (S - 1)
    value = load_token(x, tl.where(token >= 0, start + token, -1), start + count, stride, channel, inside)
    return value.to(tl.float32) + load_state(state, sequence, index, token < 0, channel, inside, C, S, STATE)


@triton.jit(do_not_specialize=["length"])
def final_state_kernel(
    x, state, rows, final, length, batch_stride, stride,
    C: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Copy the last S - 1 inputs of a sequence."""
    sequence, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    row, start, count = locate_sequence(rows, sequence, length, PACKED)
    x += row * batch_stride
    for i in tl.static_range(S - 1):
        value = load_history(x, state, sequence, start, count, count + i, stride, channel, inside, C, S, STATE)
        at = final + (sequence.to(tl.int64) * (S - 1) + i) * C + channel
        tl.store(at, value.to(final.dtype.element_ty), mask=inside)
