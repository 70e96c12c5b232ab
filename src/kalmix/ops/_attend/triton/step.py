"""Triton kernels of the step of `attend`: one query for each row, in place on a pool of histories.

Three kernels run. The first computes the position and time of each row's token. The second attends to the past tokens
of a history, in parts of equal length: one part and key head per program. The third adds the results of all parts and
the token itself, and stores the token. A part's length depends on the widths, on the room of a history and on the
number of its visible tokens only: a row has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._attend.triton.scores import LN2, LOG2E, TINY, kappa
from kalmix.ops._shared.step import Slots
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import log2, supports_ptx
from kalmix.ops._shared.triton.step import contiguous_width, row_strides

PARTS = 32  # parts of a history at most: more of them start programs that find no tokens
TIMES = 4096  # tokens of a tile of the first kernel
TILE, WARPS = 1024, 4  # elements of a tile of keys or values, and warps, of the second kernel
REGISTERS = 96  # registers of a thread of the second kernel: five programs at once on a multiprocessor
SUMS = tl.constexpr(4)  # numbers of a program's result before its sums of values
QUARTERS = tl.constexpr(0.6366197723675814)  # quarter turns of one radian
ROUND = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: adding it rounds a float64 number to an integer


@triton.jit(do_not_specialize=["S"])
def place_tokens(
    times, positions, read, given_times, now, place, times_slot, positions_slot, time_row, S,
    BLOCK: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Compute the position and the time of each row's token."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(read + row).to(tl.int64)
    last, newest = tl.full([BLOCK], -1, tl.int64), tl.full([BLOCK], float("-inf"), tl.float64)
    for first in range(0, S, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = (index < S) & (source >= 0)
        position = tl.load(positions + source * positions_slot + index, mask=inside, other=-1)
        last = tl.maximum(last, position)
        if not GIVEN:
            time = tl.load(times + source * times_slot + index, mask=inside, other=0.0)
            newest = tl.maximum(newest, tl.where(position >= 0, time, float("-inf")))
    position = tl.max(last, 0) + 1
    if GIVEN:
        time = tl.load(given_times + row * time_row).to(tl.float64)
    else:
        time = tl.where(position > 0, tl.max(newest, 0) + 1.0, 0.0)
    tl.store(place + row, position)
    tl.store(now + row, time)


@triton.jit
def cosine_and_sine(lag, frequency, dtype: tl.constexpr):
    """Return cosine and sine of lag * frequency `[tokens, channels]`; the angle is reduced in float64."""
    turns = lag[:, None] * (frequency.to(tl.float64) * QUARTERS)[None, :]
    rounded = turns + ROUND
    quadrant = rounded.to(tl.int64, bitcast=True).to(tl.int32)  # the lowest bits are those of the integer
    rest = (turns - (rounded - ROUND)).to(dtype)
    if dtype == tl.float64:
        sine, cosine = tl.sin(rest / QUARTERS), tl.cos(rest / QUARTERS)
    else:  # polynomials on [-1/2, 1/2], with an error of 1e-7
        square = rest * rest
        sine = ((-0.004602163104758229 * square + 0.07968022285810601) * square - 0.6459634781534175) * square
        sine = (sine + 1.5707963219600274) * rest
        cosine = ((0.0009067416464159691 * square - 0.02086152899322654) * square + 0.25366941041715557) * square
        cosine = (cosine - 1.2337005493749846) * square + 1.0
    odd = (quadrant & 1) != 0
    swapped = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    cosine = tl.where(((quadrant + 1) & 2) != 0, -swapped[0], swapped[0])
    sine = tl.where((quadrant & 2) != 0, -swapped[1], swapped[1])
    return cosine, sine


@triton.jit
def load_noises(log_decay, process_noise, key_noise, query_noise, head, dtype: tl.constexpr):
    """Load the rate and the variances of process, keys and queries of a head."""
    return (
        -tl.load(log_decay + head).to(dtype), tl.load(process_noise + head).to(dtype),
        tl.load(key_noise + head).to(dtype), tl.load(query_noise + head).to(dtype),
    )  # fmt: skip


@triton.jit
def lag_variances(lag, noises):
    """Return the decay, and the variances without and with query noise, of a lag >= 0."""
    rate, process, key, query = noises
    decay = tl.exp2(-LOG2E * rate * lag)
    state = process * kappa(rate, lag, decay) + key * decay * decay
    return decay, tl.maximum(state, TINY), tl.maximum(state + query, TINY)


@triton.jit
def token_scores(
    residual, key_total, value_state, value_total, inverse_nu, temperature,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the logarithms, to base 2, of a key's unnormalized weight and of its term in the precision."""
    distance = inverse_nu * residual
    log_total = distance
    if (not SHARED) or (not RATIONAL) or VARIANCE:
        log_total = log2(key_total, PTX)
    cost = log2(key_total + distance, PTX) if RATIONAL else LOG2E * distance / key_total + log_total
    log_precision = log_total
    if VARIANCE:
        log_precision = log_total - cost - log2(value_state, PTX)
    if not SHARED:
        cost += log2(value_total, PTX) - log_total
    return -temperature * cost, log_precision


@triton.jit
def copy_history(
    keys, values, times, positions, source, target, head, part, parts,
    keys_slot, values_slot, times_slot, positions_slot, S,
    H: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy a part of a history, one key head of it, to another slot; the first head copies times and positions."""
    channel, column = tl.arange(0, 2 * CHANNELS), tl.arange(0, 2 * COLUMNS)
    for first in range(part * BLOCK, S, parts * BLOCK):
        index = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = index < S
        at, mask = (index * H + head)[:, None] * KEY + channel[None, :], inside[:, None] & (channel < KEY)[None, :]
        tl.store(keys + target * keys_slot + at, tl.load(keys + source * keys_slot + at, mask=mask), mask=mask)
        at, mask = (index * H + head)[:, None] * VALUE + column[None, :], inside[:, None] & (column < VALUE)[None, :]
        tl.store(values + target * values_slot + at, tl.load(values + source * values_slot + at, mask=mask), mask=mask)
        inside = inside & (head == 0)
        time = tl.load(times + source * times_slot + index, mask=inside)
        tl.store(times + target * times_slot + index, time, mask=inside)
        position = tl.load(positions + source * positions_slot + index, mask=inside)
        tl.store(positions + target * positions_slot + index, position, mask=inside)


@triton.jit
def part_length(position, S, WINDOW, parts, BLOCK: tl.constexpr):
    """Return the number of past tokens that a query may attend to, and the number of tokens of a part."""
    past = tl.minimum(position, tl.minimum(S, WINDOW) - 1).to(tl.int32)
    blocks = (past + BLOCK - 1) // BLOCK
    return past, (blocks + parts - 1) // parts * BLOCK


@triton.jit(do_not_specialize=["S", "WINDOW"])
def attend_part(
    q, keys, values, times, positions, read, write, now, place, results,
    log_decay, frequency, process_noise, key_noise, query_noise,
    value_log_decay, value_frequency, value_process, value_key, value_query, nu, temperature, floor,
    q_row, q_head, keys_slot, values_slot, times_slot, positions_slot, S, WINDOW,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, VARIANCE: tl.constexpr, BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Attend to a part of the past tokens with a key head. The past token before the query's token has age 1."""
    dtype: tl.constexpr = keys.dtype.element_ty
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    position, time = tl.load(place + row), tl.load(now + row)
    past, length = part_length(position, S, WINDOW, tl.num_programs(2), BLOCK)
    start, stop = part * length, tl.minimum((part + 1) * length, past)
    if (source >= 0) & (start < stop):
        newest = (position % S).to(tl.int32)
        channel, column = tl.arange(0, CHANNELS), tl.arange(0, COLUMNS)
        has_channel, has_column = channel < C, column < R * D
        real = (head * R + column // D) * 2 * D + column % D  # columns of all value heads of this key head
        turn = tl.load(frequency + head * C + channel, mask=has_channel, other=0.0)
        noises = load_noises(log_decay, process_noise, key_noise, query_noise, head, dtype)
        inverse_nu, power = 1.0 / tl.load(nu + head).to(dtype), tl.load(temperature + head).to(dtype)
        offset = tl.load(floor + head).to(dtype)
        at_query = q + row * q_row + head * q_head + channel
        q_re = tl.load(at_query, mask=has_channel, other=0.0).to(dtype)[None, :]
        q_im = tl.load(at_query + C, mask=has_channel, other=0.0).to(dtype)[None, :]

        # Each row of a tile has its own sums, so that no iteration reduces over rows.
        highest, total = tl.full([BLOCK], float("-inf"), dtype), tl.zeros([BLOCK], dtype)
        highest_precision, precision = tl.full([BLOCK], float("-inf"), dtype), tl.zeros([BLOCK], dtype)
        sum_re, sum_im = tl.zeros([BLOCK, COLUMNS], dtype), tl.zeros([BLOCK, COLUMNS], dtype)
        for first in range(start, stop, BLOCK):
            age = first + 1 + tl.arange(0, BLOCK)
            inside = age <= stop
            index = newest - age
            index = tl.where(index < 0, index + S, index)
            key_mask, value_mask = inside[:, None] & has_channel[None, :], inside[:, None] & has_column[None, :]
            at_key = keys + source * keys_slot + ((index * H + head) * 2 * C)[:, None] + channel[None, :]
            k_re = tl.load(at_key, mask=key_mask, other=0.0)
            k_im = tl.load(at_key + C, mask=key_mask, other=0.0)
            at_value = values + source * values_slot + (index * (H * R * 2 * D))[:, None] + real[None, :]
            v_re = tl.load(at_value, mask=value_mask, other=0.0)
            v_im = tl.load(at_value + D, mask=value_mask, other=0.0)
            at_position = tl.load(positions + source * positions_slot + index, mask=inside, other=-1)
            at_time = tl.load(times + source * times_slot + index, mask=inside, other=0.0)
            visible = inside & (at_position >= 0) & (position - at_position < WINDOW)
            lag = tl.where(visible, tl.maximum(time - at_time, 0.0), 0.0)

            tau = lag.to(dtype)
            decay, state, key_total = lag_variances(tau, noises)
            cos, sin = cosine_and_sine(lag, turn, dtype)
            factor = (decay + offset)[:, None]
            error_re = q_re - factor * (k_re * cos - k_im * sin)
            error_im = q_im - factor * (k_re * sin + k_im * cos)
            residual = tl.sum(error_re * error_re + error_im * error_im, 1)
            value_total = key_total
            if not SHARED:
                decay, state, value_total = lag_variances(
                    tau, load_noises(value_log_decay, value_process, value_key, value_query, head, dtype)
                )
            score, log_precision = token_scores(
                residual, key_total, state, value_total, inverse_nu, power, SHARED, RATIONAL, VARIANCE, PTX
            )
            score = tl.where(visible, score, float("-inf"))
            new_highest = tl.maximum(highest, score)
            anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weight, shrink = tl.exp2(score - anchor), tl.exp2(highest - anchor)
            highest = new_highest
            total = total * shrink + weight
            if not (SHARED and R == 1):
                value_turn = tl.load(value_frequency + head * D + column % D)
                cos, sin = cosine_and_sine(lag, value_turn, dtype)
            weight = (weight * decay)[:, None]
            v_re, v_im = tl.where(visible[:, None], v_re, 0.0), tl.where(visible[:, None], v_im, 0.0)
            sum_re = sum_re * shrink[:, None] + weight * (v_re * cos - v_im * sin)
            sum_im = sum_im * shrink[:, None] + weight * (v_re * sin + v_im * cos)
            if VARIANCE:
                log_precision = tl.where(visible, log_precision, float("-inf"))
                new_highest = tl.maximum(highest_precision, log_precision)
                anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                precision = precision * tl.exp2(highest_precision - anchor) + tl.exp2(log_precision - anchor)
                highest_precision = new_highest

        at = results + ((row * H + head) * tl.num_programs(2) + part) * (SUMS + 2 * COLUMNS)
        top = tl.max(highest, 0)
        shrink = tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top))
        tl.store(at, top)
        tl.store(at + 1, tl.sum(total * shrink, 0))
        tl.store(at + SUMS + column, tl.sum(sum_re * shrink[:, None], 0))
        tl.store(at + SUMS + COLUMNS + column, tl.sum(sum_im * shrink[:, None], 0))
        if VARIANCE:
            top = tl.max(highest_precision, 0)
            shrink = tl.exp2(highest_precision - tl.where(top == float("-inf"), 0.0, top))
            tl.store(at + 2, top)
            tl.store(at + 3, tl.sum(precision * shrink, 0))
    if (source >= 0) & (target >= 0) & (source != target):
        copy_history(
            keys, values, times, positions, source, target, head, part, tl.num_programs(2),
            keys_slot, values_slot, times_slot, positions_slot, S, H, 2 * C, R * 2 * D, BLOCK, CHANNELS, COLUMNS,
        )  # fmt: skip


@triton.jit
def combine(logs, sums, own_log):
    """Add a term 2^own_log to partial sums, each times 2^log.

    Return the factors of the sums and of the term, the sum, and the logarithm of its scale.
    """
    highest = tl.maximum(tl.max(logs, 0), own_log)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    factors, own = tl.exp2(logs - anchor), tl.exp2(own_log - anchor)
    return factors, own, tl.sum(factors * sums, 0) + own, highest


@triton.jit(do_not_specialize=["parts", "S", "WINDOW"])
def add_parts(
    q, k, v, keys, values, times, positions, read, write, now, place, results, mean, variance,
    key_noise, query_noise, value_key, value_query, nu, temperature, floor,
    q_row, q_head, k_row, k_head, v_row, keys_slot, values_slot, times_slot, positions_slot, parts, S, WINDOW,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, VARIANCE: tl.constexpr, BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the token itself and the results of all parts of a row and key head; store the token."""
    dtype: tl.constexpr = keys.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    position, time = tl.load(place + row), tl.load(now + row)
    active, stored = source >= 0, (source >= 0) & (target >= 0)
    channel, column = tl.arange(0, CHANNELS), tl.arange(0, COLUMNS)
    has_channel, has_column = (channel < C) & active, (column < R * D) & active
    real = (head * R + column // D) * 2 * D + column % D
    q += row * q_row + head * q_head + channel
    k += row * k_row + head * k_head + channel
    k_re = tl.load(k, mask=has_channel, other=0.0).to(dtype)
    k_im = tl.load(k + C, mask=has_channel, other=0.0).to(dtype)
    v_re = tl.load(v + row * v_row + real, mask=has_column, other=0.0).to(dtype)
    v_im = tl.load(v + row * v_row + D + real, mask=has_column, other=0.0).to(dtype)
    factor = 1.0 + tl.load(floor + head).to(dtype)
    error_re = tl.load(q, mask=has_channel, other=0.0).to(dtype) - factor * k_re
    error_im = tl.load(q + C, mask=has_channel, other=0.0).to(dtype) - factor * k_im
    residual = tl.sum(error_re * error_re + error_im * error_im, 0)
    state = tl.maximum(tl.load(key_noise + head).to(dtype), TINY)
    key_total = tl.maximum(state + tl.load(query_noise + head).to(dtype), TINY)
    value_total = key_total
    if not SHARED:
        state = tl.maximum(tl.load(value_key + head).to(dtype), TINY)
        value_total = tl.maximum(state + tl.load(value_query + head).to(dtype), TINY)
    inverse_nu, power = 1.0 / tl.load(nu + head).to(dtype), tl.load(temperature + head).to(dtype)
    score, log_precision = token_scores(
        residual, key_total, state, value_total, inverse_nu, power, SHARED, RATIONAL, VARIANCE, PTX
    )

    part = tl.arange(0, PARTS)
    past, length = part_length(position, S, WINDOW, parts, BLOCK)
    used = (part < parts) & (part * length < past) & active
    at = results + ((row * H + head) * parts + part) * (SUMS + 2 * COLUMNS)
    highest = tl.load(at, mask=used, other=float("-inf"))
    total = tl.load(at + 1, mask=used, other=0.0)
    at_sums = at[:, None] + SUMS + column[None, :]
    sum_re = tl.load(at_sums, mask=used[:, None], other=0.0)
    sum_im = tl.load(at_sums + COLUMNS, mask=used[:, None], other=0.0)
    factors, own, total, _ = combine(highest, total, score)
    total = tl.where(active, total, 1.0)
    sum_re = (tl.sum(factors[:, None] * sum_re, 0) + own * v_re) / total
    sum_im = (tl.sum(factors[:, None] * sum_im, 0) + own * v_im) / total
    to, inside = mean + row * (H * R * 2 * D) + real, column < R * D
    tl.store(to, tl.where(active, sum_re, 0.0).to(mean.dtype.element_ty), mask=inside)
    tl.store(to + D, tl.where(active, sum_im, 0.0).to(mean.dtype.element_ty), mask=inside)
    if VARIANCE:
        highest = tl.load(at + 2, mask=used, other=float("-inf"))
        _, _, precision, highest = combine(highest, tl.load(at + 3, mask=used, other=0.0), log_precision)
        value = tl.exp(tl.minimum(-LN2 * (highest + log2(precision, PTX)), 87.0))
        value = tl.where(active, value, 0.0)
        tl.store(variance + row * (H * R) + head * R + column // D, value, mask=inside & (column % D == 0))

    newest = position % S
    at_key = keys + target * keys_slot + (newest * H + head) * 2 * C + channel
    tl.store(at_key, k_re, mask=has_channel & stored)
    tl.store(at_key + C, k_im, mask=has_channel & stored)
    at_value = values + target * values_slot + newest * (H * R * 2 * D) + real
    tl.store(at_value, v_re, mask=has_column & stored)
    tl.store(at_value + D, v_im, mask=has_column & stored)
    tl.store(times + target * times_slot + newest, time, mask=(head == 0) & stored)
    tl.store(positions + target * positions_slot + newest, position, mask=(head == 0) & stored)


def step(
    signals: AttendSignals,
    pool: HistoryBelief,
    slots: Slots,
    out: tuple[Tensor, Tensor | None] | None,
    variance: bool,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernels; return the mean `[B, 1, G, 2 D]`, and the variance `[B, 1, G, 1]` if requested."""
    q, k = (contiguous_width(x) for x in signals[:2])
    v = signals.v if signals.v[:1].is_contiguous() else signals.v.contiguous()
    given, keys, weighting = signals.times, signals.key_dynamics, signals.weighting
    values = keys if signals.value_dynamics is None else signals.value_dynamics
    (batch, _, heads, width), group = q.shape, v.shape[2] // q.shape[2]
    channels, size = v.shape[3] // 2, pool.positions.shape[1]
    device, dtype = v.device, pool.keys.dtype
    mean, read_variance = (None, None) if out is None else out
    mean = torch.empty(v.shape, dtype=v.dtype, device=device) if mean is None else mean
    if variance and read_variance is None:
        read_variance = torch.empty(*v.shape[:3], 1, dtype=dtype, device=device)
    columns = max(16, triton.next_power_of_2(group * channels))
    padded = max(16, triton.next_power_of_2(width // 2))
    block = max(4, TILE // max(columns, padded))
    parts = min(PARTS, triton.cdiv(size, block))
    now = torch.empty(batch, dtype=torch.float64, device=device)
    place = torch.empty(batch, dtype=torch.int64, device=device)
    results = torch.empty(batch, heads, parts, SUMS.value + 2 * columns, dtype=dtype, device=device)
    strides, window = [x.stride(0) for x in pool], size if weighting.window is None else weighting.window
    keys, values, robust = ([x.contiguous() for x in group] for group in (keys, values, weighting[:3]))
    options = {
        "H": heads, "R": group, "C": width // 2, "D": channels,
        "SHARED": signals.value_dynamics is None, "RATIONAL": weighting.rational, "VARIANCE": variance,
        "BLOCK": block, "CHANNELS": padded, "COLUMNS": columns, "PTX": supports_ptx() and dtype == torch.float32,
    }  # fmt: skip
    limit = {"maxnreg": REGISTERS} if options["PTX"] and block * columns <= TILE else {}
    tokens = min(TIMES, triton.next_power_of_2(size))
    Launch(place_tokens, (batch,), (
        pool.times, pool.positions, slots.read, now if given is None else given, now, place, *strides[2:],
        0 if given is None else given.stride(0), size,
    ), {"BLOCK": tokens, "GIVEN": given is not None, "num_warps": max(4, tokens // 512)}).run()  # fmt: skip
    Launch(attend_part, (batch, heads, parts), (
        q, *pool, *slots, now, place, results, *keys, *values, *robust, *row_strides(q), *strides, size, window,
    ), {**options, **limit, "num_warps": WARPS}).run()  # fmt: skip
    Launch(add_parts, (batch, heads), (
        q, k, v, *pool, *slots, now, place, results, mean, mean if read_variance is None else read_variance,
        *keys[3:], *values[3:], *robust, *row_strides(q), *row_strides(k), v.stride(0), *strides, parts, size, window,
    ), {**options, "PARTS": triton.next_power_of_2(parts), "num_warps": 4}).run()  # fmt: skip
    return mean, read_variance if variance else None
