"""Per-token parts of `attend_radial` in Triton: rotation, directions, outputs, and their backward pass.

Rotated tensors are `[R, H, tokens, 2 C]`. The direction u of a query is that of its own value, 0 if the value is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._attend.triton.rotary import cosine_and_sine
from kalmix.ops._shared.triton.tiles import load_rows, store_rows

TILE = 16  # tokens per program
SIZES = ["tokens", "slots", "H"]  # integer arguments whose values do not trigger recompilation


@triton.jit
def load_halves(base, stride, count, channel, C: tl.constexpr, SIZE: tl.constexpr):
    """Load real and imaginary parts of rows as float32 `[SIZE, channels]`."""
    real = load_rows(base, stride, count, channel, C, SIZE).to(tl.float32)
    return real, load_rows(base + C, stride, count, channel, C, SIZE).to(tl.float32)


@triton.jit
def store_halves(base, stride, count, channel, x, C: tl.constexpr, SIZE: tl.constexpr):
    store_rows(base, stride, count, channel, x[0], C, SIZE)
    store_rows(base + C, stride, count, channel, x[1], C, SIZE)


@triton.jit
def turn(x, cosine, sine):
    """Multiply complex rows by cosine + i sine."""
    return x[0] * cosine - x[1] * sine, x[1] * cosine + x[0] * sine


@triton.jit
def inner(x, y):
    """Return x^* y of complex rows: real and imaginary part `[SIZE]`."""
    return tl.sum(x[0] * y[0] + x[1] * y[1], 1), tl.sum(x[0] * y[1] - x[1] * y[0], 1)


@triton.jit
def scaled(x, factor):
    return x[0] * factor[:, None], x[1] * factor[:, None]


@triton.jit
def times_complex(x, factor):
    """Multiply complex rows by one complex number per row."""
    real, imaginary = factor[0][:, None], factor[1][:, None]
    return x[0] * real - x[1] * imaginary, x[1] * real + x[0] * imaginary


@triton.jit
def keep_rows(x, mask):
    """Set rows to 0 where `mask` is false, also if they are not finite."""
    return tl.where(mask[:, None], x[0], 0.0), tl.where(mask[:, None], x[1], 0.0)


@triton.jit
def round_halves(x, like):
    dtype = like.dtype.element_ty
    return x[0].to(dtype).to(tl.float32), x[1].to(dtype).to(tl.float32)


@triton.jit
def squared_norm(x):
    return tl.sum(x[0] * x[0] + x[1] * x[1], 1)


@triton.jit
def unit_rows(x):
    """Divide rows by their norms; return 0 where the squared norm is 0. Also return the inverse norms."""
    square = squared_norm(x)
    inverse = tl.where(square > 0, 1.0 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)
    return scaled(x, inverse), inverse


@triton.jit(do_not_specialize=SIZES)
def rotate_tokens_kernel(
    q, k, v, q_token, q_head, k_token, k_head, v_token, v_head, times, frequency, rotated_q, direction, rotated_k,
    rotated_v, query_scalars, key_norms, tokens, slots, H,
    C: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rotate queries, keys, values and directions back by frequency * time.

    Also store the scalars of queries, float32 `[3, R, H, tokens]`: squared norm, and products with u and i u; and the
    squared norms of keys `[R, H, slots]`. Tokens that are not finite are stored as 0, with a norm of NaN.
    """
    start, head, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, t = tl.arange(0, P), tl.arange(0, TILE)
    count, past_length = slots - start, slots - tokens
    cosine, sine = cosine_and_sine(times, frequency + head * C, row * slots + start, count, channel, C, TILE)
    time = tl.load(times + row * slots + start + t, mask=t < count, other=0.0).to(tl.float32)
    slot = row * slots + start
    key = load_halves(k + slot * k_token + head * k_head, k_token, count, channel, C, TILE)
    value = load_halves(v + slot * v_token + head * v_head, v_token, count, channel, C, TILE)
    norm = squared_norm(key) + squared_norm(value) + time * 0.0
    finite = norm < float("inf")
    value = keep_rows(value, finite)
    cosine, sine = tl.where(finite[:, None], cosine, 0.0), tl.where(finite[:, None], sine, 0.0)
    back = tl.zeros_like(sine) - sine
    key = round_halves(turn(keep_rows(key, finite), cosine, back), rotated_k)
    place = (row * H + head) * slots + start
    store_halves(rotated_k + place * 2 * C, 2 * C, count, channel, key, C, TILE)
    store_halves(rotated_v + place * 2 * C, 2 * C, count, channel, turn(value, cosine, back), C, TILE)
    tl.store(key_norms + place + t, tl.where(finite, squared_norm(key), float("nan")), mask=t < count)
    # Queries are the tokens of the last slots.
    index = start + t - past_length
    is_query = (index >= 0) & (t < count)
    token = row * tokens + start - past_length
    q += token * q_token + head * q_head
    inside = is_query[:, None] & (channel < C)[None, :]
    offset = t[:, None] * q_token + channel[None, :]
    query = (
        tl.load(q + offset, mask=inside, other=0.0).to(tl.float32),
        tl.load(q + C + offset, mask=inside, other=0.0).to(tl.float32),
    )
    finite_query = squared_norm(query) < float("inf")
    query = round_halves(turn(keep_rows(query, finite_query), cosine, back), rotated_q)
    unit, _inverse = unit_rows(value)
    unit = round_halves(turn(unit, cosine, back), rotated_q)
    place = (row * H + head) * tokens + start - past_length
    offset = place * 2 * C + t[:, None] * (2 * C) + channel[None, :]
    dtype = rotated_q.dtype.element_ty
    tl.store(rotated_q + offset, query[0].to(dtype), mask=inside)
    tl.store(rotated_q + C + offset, query[1].to(dtype), mask=inside)
    tl.store(direction + offset, unit[0].to(dtype), mask=inside)
    tl.store(direction + C + offset, unit[1].to(dtype), mask=inside)
    real, imaginary = inner(unit, query)
    stride = tl.num_programs(2).to(tl.int64) * H * tokens
    at = query_scalars + place + t
    tl.store(at, tl.where(finite_query & finite, squared_norm(query), float("nan")), mask=is_query)
    tl.store(at + stride, real, mask=is_query)
    tl.store(at + 2 * stride, imaginary, mask=is_query)


@triton.jit
def combine(value, step):
    """Return u, its inverse length, u^* step, v + w, and the direction of v + w with its inverse length."""
    unit, inverse = unit_rows(value)
    along = inner(unit, step)
    parallel = times_complex(unit, along)
    total = value[0] + step[0] - parallel[0], value[1] + step[1] - parallel[1]
    direction, inverse_total = unit_rows(total)
    return unit, inverse, along, direction, inverse_total


@triton.jit(do_not_specialize=SIZES)
def outputs_kernel(
    v, v_token, v_head, times, frequency, step, magnitudes, mean, tokens, slots, H,
    C: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the mean `[R, T, H, 2 C]` from the rotated steps and the magnitudes of queries."""
    start, head, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, t, count, slot = tl.arange(0, P), tl.arange(0, TILE), tokens - start, row * slots + slots - tokens + start
    cosine, sine = cosine_and_sine(times, frequency + head * C, slot, count, channel, C, TILE)
    value = load_halves(v + slot * v_token + head * v_head, v_token, count, channel, C, TILE)
    place = (row * H + head) * tokens + start
    turned = turn(load_halves(step + place * 2 * C, 2 * C, count, channel, C, TILE), cosine, sine)
    _unit, _inverse, _along, direction, _inverse_total = combine(value, turned)
    magnitude = tl.load(magnitudes + place + t, mask=t < count, other=0.0)
    token = row * tokens + start
    store_halves(mean + (token * H + head) * 2 * C, H * 2 * C, count, channel, scaled(direction, magnitude), C, TILE)


@triton.jit
def combine_vjp(value, step, magnitude, grad):
    """Compute gradients of the mean: of the magnitude, of v + w, of the step, and of u."""
    unit, _inverse, along, direction, inverse_total = combine(value, step)
    grad_magnitude, _ = inner(direction, grad)
    factor = magnitude * inverse_total
    grad_total = (
        (grad[0] - direction[0] * grad_magnitude[:, None]) * factor[:, None],
        (grad[1] - direction[1] * grad_magnitude[:, None]) * factor[:, None],
    )
    parallel = inner(unit, grad_total)
    removed = times_complex(unit, parallel)
    grad_step = grad_total[0] - removed[0], grad_total[1] - removed[1]
    first = times_complex(grad_total, (along[0], tl.zeros_like(along[1]) - along[1]))
    second = times_complex(step, (parallel[0], tl.zeros_like(parallel[1]) - parallel[1]))
    grad_unit = tl.zeros_like(first[0]) - first[0] - second[0], tl.zeros_like(first[1]) - first[1] - second[1]
    return grad_magnitude, grad_total, grad_step, grad_unit


@triton.jit(do_not_specialize=SIZES)
def outputs_backward_kernel(
    grad_mean, g_token, g_head, v, v_token, v_head, times, frequency, step, magnitudes, max_scores, weight_sums,
    grad_step, query_grads, tokens, slots, H,
    C: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of rotated steps, and per query, float32 `[3, R, H, tokens]`: the gradient of the magnitude
    and the sums of normalized weights times their gradients, along and across.

    All are divided by the sums of weights, so that kernels over pairs need no normalized weights. They are 0
    for queries whose output or upstream gradient is not finite.
    """
    start, head, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, t, count, slot = tl.arange(0, P), tl.arange(0, TILE), tokens - start, row * slots + slots - tokens + start
    cosine, sine = cosine_and_sine(times, frequency + head * C, slot, count, channel, C, TILE)
    place = (row * H + head) * tokens + start
    valid = tl.load(max_scores + place + t, mask=t < count, other=1e38) < 1e38
    cosine, sine = tl.where(valid[:, None], cosine, 0.0), tl.where(valid[:, None], sine, 0.0)
    grad = load_halves(grad_mean + (row * tokens + start) * g_token + head * g_head, g_token, count, channel, C, TILE)
    valid = valid & (tl.sum(0.0 * grad[0] + 0.0 * grad[1], 1) == 0.0)
    value = load_halves(v + slot * v_token + head * v_head, v_token, count, channel, C, TILE)
    rotated = load_halves(step + place * 2 * C, 2 * C, count, channel, C, TILE)
    magnitude = tl.load(magnitudes + place + t, mask=t < count, other=0.0)
    magnitude = tl.where(valid, magnitude, 0.0)
    rotated = keep_rows(rotated, valid)
    grad_magnitude, _total, grad_turned, _unit = combine_vjp(
        keep_rows(value, valid), turn(rotated, cosine, sine), magnitude, keep_rows(grad, valid)
    )
    back = tl.zeros_like(sine) - sine
    stride = tl.num_programs(2).to(tl.int64) * H * tokens
    inverse_0 = 1.0 / tl.load(weight_sums + place + t, mask=t < count, other=1.0)
    inverse_1 = 1.0 / tl.load(weight_sums + stride + place + t, mask=t < count, other=1.0)
    grad_rotated = round_halves(scaled(turn(grad_turned, cosine, back), inverse_1), grad_step)
    grad_magnitude *= inverse_0
    store_halves(grad_step + place * 2 * C, 2 * C, count, channel, grad_rotated, C, TILE)
    delta, _ = inner(rotated, grad_rotated)
    at = query_grads + place + t
    tl.store(at, grad_magnitude, mask=t < count)
    tl.store(at + stride, magnitude * grad_magnitude, mask=t < count)
    tl.store(at + 2 * stride, delta, mask=t < count)


@triton.jit
def frequency_grad(grad, rotated):
    """Return the gradient of the frequency over time of x from its rotated value exp(-i w t) x."""
    return grad[0] * rotated[1] - grad[1] * rotated[0]


@triton.jit(do_not_specialize=SIZES)
def tokens_backward_kernel(
    grad_mean, g_token, g_head, v, v_token, v_head, times, frequency, step, magnitudes, max_scores, weight_sums,
    grad_step, rotated_q, direction, rotated_k, rotated_v, key_norms, grad_rotated_q, grad_direction, grad_scalars,
    grad_rotated_k, grad_rotated_v, grad_key_norms, grad_q, grad_k, grad_v, grad_frequency, tokens, slots, H,
    C: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, k and v from those of the rotated ones, and partial sums of those of frequencies.

    A non-finite upstream gradient makes the gradient of frequencies NaN, so that the error is visible.
    """
    start, head, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, t = tl.arange(0, P), tl.arange(0, TILE)
    count, past_length, slot = slots - start, slots - tokens, row * slots + start
    cosine, sine = cosine_and_sine(times, frequency + head * C, slot, count, channel, C, TILE)
    place = (row * H + head) * slots + start
    norm = tl.load(key_norms + place + t, mask=t < count, other=0.0)
    finite = norm == norm
    cosine, sine = tl.where(finite[:, None], cosine, 0.0), tl.where(finite[:, None], sine, 0.0)
    grad_norm = 2.0 * tl.load(grad_key_norms + place + t, mask=t < count, other=0.0)
    key = load_halves(rotated_k + place * 2 * C, 2 * C, count, channel, C, TILE)
    grad_key = load_halves(grad_rotated_k + place * 2 * C, 2 * C, count, channel, C, TILE)
    grad_key = grad_key[0] + key[0] * grad_norm[:, None], grad_key[1] + key[1] * grad_norm[:, None]
    rotated_value = load_halves(rotated_v + place * 2 * C, 2 * C, count, channel, C, TILE)
    grad_value = load_halves(grad_rotated_v + place * 2 * C, 2 * C, count, channel, C, TILE)
    grad_sum = frequency_grad(grad_key, key) + frequency_grad(grad_value, rotated_value)
    output = (slot * H + head) * 2 * C
    store_halves(grad_k + output, H * 2 * C, count, channel, turn(grad_key, cosine, sine), C, TILE)
    grad_value = turn(grad_value, cosine, sine)
    # Queries are the tokens of the last slots; rows before them load zeros.
    token = start - past_length
    is_query = (token + t >= 0) & (t < count)
    inside = is_query[:, None] & (channel < C)[None, :]
    place = (row * H + head) * tokens + token
    offset = place * 2 * C + t[:, None] * (2 * C) + channel[None, :]
    g_offset = (row * tokens + token) * g_token + head * g_head + t[:, None] * g_token + channel[None, :]
    grad = (
        tl.load(grad_mean + g_offset, mask=inside, other=0.0).to(tl.float32),
        tl.load(grad_mean + C + g_offset, mask=inside, other=0.0).to(tl.float32),
    )
    nonfinite = tl.sum(0.0 * grad[0] + 0.0 * grad[1], 1)
    attends = tl.load(max_scores + place + t, mask=is_query, other=1e38) < 1e38
    valid = attends & (nonfinite == 0.0) & finite
    query = (tl.load(rotated_q + offset, mask=inside, other=0.0).to(tl.float32),
             tl.load(rotated_q + C + offset, mask=inside, other=0.0).to(tl.float32))  # fmt: skip
    unit = (tl.load(direction + offset, mask=inside, other=0.0).to(tl.float32),
            tl.load(direction + C + offset, mask=inside, other=0.0).to(tl.float32))  # fmt: skip
    rotated = (tl.load(step + offset, mask=inside, other=0.0), tl.load(step + C + offset, mask=inside, other=0.0))
    grad_rotated = (tl.load(grad_step + offset, mask=inside, other=0.0).to(tl.float32),
                    tl.load(grad_step + C + offset, mask=inside, other=0.0).to(tl.float32))  # fmt: skip
    grad_query = (tl.load(grad_rotated_q + offset, mask=inside, other=0.0),
                  tl.load(grad_rotated_q + C + offset, mask=inside, other=0.0))  # fmt: skip
    grad_unit = (tl.load(grad_direction + offset, mask=inside, other=0.0),
                 tl.load(grad_direction + C + offset, mask=inside, other=0.0))  # fmt: skip
    stride = tl.num_programs(2).to(tl.int64) * H * tokens
    at = grad_scalars + place + t
    grad_norm = 2.0 * tl.load(at, mask=is_query, other=0.0)
    grad_real = tl.load(at + stride, mask=is_query, other=0.0)
    grad_imaginary = tl.load(at + 2 * stride, mask=is_query, other=0.0)
    # The scalars are |q|^2, the real part of u^* q and its imaginary part.
    through_query = times_complex(unit, (grad_real, grad_imaginary))
    through_unit = times_complex(query, (grad_real, tl.zeros_like(grad_imaginary) - grad_imaginary))
    grad_query = (
        grad_query[0] + query[0] * grad_norm[:, None] + through_query[0],
        grad_query[1] + query[1] * grad_norm[:, None] + through_query[1],
    )
    grad_unit = grad_unit[0] + through_unit[0], grad_unit[1] + through_unit[1]
    rotated = keep_rows(rotated, valid)
    grad_sum += frequency_grad(grad_query, query) + frequency_grad(grad_unit, unit)
    weight_sum = tl.load(weight_sums + stride + place + t, mask=is_query, other=0.0)  # undoes the division
    grad_sum -= frequency_grad(grad_rotated, rotated) * weight_sum[:, None]
    grad_query = turn(grad_query, cosine, sine)
    q_offset = ((row * tokens + token) * H + head) * 2 * C + t[:, None] * (H * 2 * C) + channel[None, :]
    tl.store(grad_q + q_offset, grad_query[0].to(grad_q.dtype.element_ty), mask=inside)
    tl.store(grad_q + C + q_offset, grad_query[1].to(grad_q.dtype.element_ty), mask=inside)
    value = keep_rows(
        load_halves(v + slot * v_token + head * v_head, v_token, count, channel, C, TILE), is_query & finite
    )
    magnitude = tl.where(valid, tl.load(magnitudes + place + t, mask=is_query, other=0.0), 0.0)
    _magnitude, grad_total, _step, grad_own = combine_vjp(
        value, turn(rotated, cosine, sine), magnitude, keep_rows(grad, valid)
    )
    own_unit, inverse = unit_rows(value)
    turned = turn(grad_unit, cosine, sine)
    grad_own = turned[0] + grad_own[0], turned[1] + grad_own[1]
    radial, _ = inner(own_unit, grad_own)
    grad_value = (
        grad_value[0] + grad_total[0] + (grad_own[0] - own_unit[0] * radial[:, None]) * inverse[:, None],
        grad_value[1] + grad_total[1] + (grad_own[1] - own_unit[1] * radial[:, None]) * inverse[:, None],
    )
    store_halves(grad_v + output, H * 2 * C, count, channel, grad_value, C, TILE)
    middle = 0.5 * tl.load(times + (row + 1) * slots - 1)
    time = tl.load(times + slot + t, mask=t < count, other=0.0) - tl.where(middle - middle == 0.0, middle, 0.0)
    weight = tl.where(finite, time.to(tl.float32) + tl.where(attends, nonfinite, 0.0), 0.0)
    partial = ((row * tl.num_programs(0) + tl.program_id(0)) * H + head) * C
    tl.store(grad_frequency + partial + channel, tl.sum(grad_sum * weight[:, None], 0), mask=channel < C)
