"""Triton kernels of the step of `attend`: one query for each row, in place on a pool of histories.

Three kernels run: the first computes the position and time of each row's token, the second attends to `SPLIT` tokens of
a history per program, and the third adds their results. Sizes depend on widths and on the room of a history only: a row
has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._attend.triton.scores import TINY, kappa
from kalmix.ops._shared.step import Slots
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.step import contiguous_width, row_strides

SPLIT, TIMES = 256, 1024  # tokens of a program of the second and of the first kernel's loop
TILE = 2048  # elements of a tile of keys or values
SUMS = tl.constexpr(4)  # numbers of a program's result before its sums of values
TURN = tl.constexpr(6.283185307179586)


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
        time = tl.load(times + source * times_slot + index, mask=inside, other=0.0)
        last = tl.maximum(last, position)
        newest = tl.maximum(newest, tl.where(position >= 0, time, float("-inf")))
    position = tl.max(last, 0) + 1
    time = tl.where(position > 0, tl.max(newest, 0) + 1.0, 0.0)
    if GIVEN:
        time = tl.load(given_times + row * time_row).to(tl.float64)
    tl.store(place + row, position)
    tl.store(now + row, time)


@triton.jit
def cosine_and_sine(lag, frequency, dtype: tl.constexpr):
    """Return cosine and sine of lag * frequency; the angle is reduced in float64."""
    angle = lag[:, None] * frequency.to(tl.float64)[None, :]
    angle = (angle - TURN * tl.floor(angle / TURN + 0.5)).to(dtype)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def lag_variances(lag, rate, process, key, query):
    """Return the decay, and the variances without and with query noise, of a lag >= 0."""
    decay = tl.exp(-rate * lag)
    state = process * kappa(rate, lag, decay) + key * decay * decay
    return decay, tl.maximum(state, TINY), tl.maximum(state + query, TINY)


@triton.jit(do_not_specialize=["S", "WINDOW"])
def attend_split(
    q, k, v, keys, values, times, positions, read, write, now, place, results,
    log_decay, frequency, process_noise, key_noise, query_noise,
    value_log_decay, value_frequency, value_process, value_key, value_query, nu, temperature, floor,
    q_row, q_head, k_row, k_head, v_row, keys_slot, values_slot, times_slot, positions_slot, S, WINDOW,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Attend to a part of a history with a key head, and store the keys and values of the token."""
    dtype: tl.constexpr = keys.dtype.element_ty
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active = source >= 0
    position, time = tl.load(place + row), tl.load(now + row)
    newest = position % S
    channel, column = tl.arange(0, CHANNELS), tl.arange(0, COLUMNS)
    has_channel, has_column = (channel < C) & active, (column < R * D) & active
    real = (head * R + column // D) * 2 * D + column % D  # columns of the values of all value heads of this key head
    turn = tl.load(frequency + head * C + channel, mask=channel < C, other=0.0)
    value_turn = tl.load(value_frequency + head * D + column % D)
    rate, process = -tl.load(log_decay + head).to(dtype), tl.load(process_noise + head).to(dtype)
    key_var, query_var = tl.load(key_noise + head).to(dtype), tl.load(query_noise + head).to(dtype)
    scale, power = tl.load(nu + head).to(dtype), tl.load(temperature + head).to(dtype)
    offset = tl.load(floor + head).to(dtype)
    q += row * q_row + head * q_head
    k += row * k_row + head * k_head
    q_re = tl.load(q + channel, mask=has_channel, other=0.0).to(dtype)
    q_im = tl.load(q + C + channel, mask=has_channel, other=0.0).to(dtype)
    new_k_re = tl.load(k + channel, mask=has_channel, other=0.0).to(dtype)
    new_k_im = tl.load(k + C + channel, mask=has_channel, other=0.0).to(dtype)
    new_v_re = tl.load(v + row * v_row + real, mask=has_column, other=0.0).to(dtype)
    new_v_im = tl.load(v + row * v_row + D + real, mask=has_column, other=0.0).to(dtype)

    highest, total = tl.full([], float("-inf"), dtype), tl.zeros([], dtype)
    highest_precision, precision = tl.full([], float("-inf"), dtype), tl.zeros([], dtype)
    sum_re, sum_im = tl.zeros([COLUMNS], dtype), tl.zeros([COLUMNS], dtype)
    for first in range(0, SPLIT, BLOCK):
        index = split * SPLIT + first + tl.arange(0, BLOCK)
        inside = (index < S) & active
        is_new = index == newest
        at_position = tl.load(positions + source * positions_slot + index, mask=inside, other=-1)
        at_position = tl.where(is_new, position, at_position)
        visible = inside & (at_position >= 0) & (position - at_position < WINDOW)
        at_time = tl.load(times + source * times_slot + index, mask=visible & (is_new == 0), other=0.0)
        lag = tl.where(visible & (is_new == 0), tl.maximum(time - at_time, 0.0), 0.0)

        loaded = (visible | (inside & (source != target)))[:, None]  # tokens to attend to or to copy
        at_key = ((index * H + head) * 2 * C)[:, None] + channel[None, :]
        key_mask = loaded & has_channel[None, :]
        k_re = tl.load(keys + source * keys_slot + at_key, mask=key_mask, other=0.0)
        k_im = tl.load(keys + source * keys_slot + at_key + C, mask=key_mask, other=0.0)
        k_re = tl.where(is_new[:, None], new_k_re[None, :], k_re)
        k_im = tl.where(is_new[:, None], new_k_im[None, :], k_im)
        at_value = (index * (H * R * 2 * D))[:, None] + real[None, :]
        value_mask = loaded & has_column[None, :]
        v_re = tl.load(values + source * values_slot + at_value, mask=value_mask, other=0.0)
        v_im = tl.load(values + source * values_slot + at_value + D, mask=value_mask, other=0.0)
        v_re = tl.where(is_new[:, None], new_v_re[None, :], v_re)
        v_im = tl.where(is_new[:, None], new_v_im[None, :], v_im)
        stored = (inside & (target >= 0) & (is_new | (source != target)))[:, None]
        tl.store(keys + target * keys_slot + at_key, k_re, mask=key_mask & stored)
        tl.store(keys + target * keys_slot + at_key + C, k_im, mask=key_mask & stored)
        tl.store(values + target * values_slot + at_value, v_re, mask=value_mask & stored)
        tl.store(values + target * values_slot + at_value + D, v_im, mask=value_mask & stored)

        tau = lag.to(dtype)
        decay, state, variance = lag_variances(tau, rate, process, key_var, query_var)
        cos, sin = cosine_and_sine(lag, turn, dtype)
        factor = (decay + offset)[:, None]
        error_re = q_re[None, :] - factor * (k_re * cos - k_im * sin)
        error_im = q_im[None, :] - factor * (k_re * sin + k_im * cos)
        residual = tl.sum(error_re * error_re + error_im * error_im, 1)
        value_decay, value_state, value_variance = decay, state, variance
        if not SHARED:
            value_rate = -tl.load(value_log_decay + head).to(dtype)
            value_decay, value_state, value_variance = lag_variances(
                tau, value_rate, tl.load(value_process + head).to(dtype), tl.load(value_key + head).to(dtype),
                tl.load(value_query + head).to(dtype),
            )  # fmt: skip
        ratio = residual / (scale * variance)
        neg_log_weight = ratio
        if RATIONAL:
            neg_log_weight = tl.log(1.0 + ratio)
        score = tl.where(visible, -power * (neg_log_weight + tl.log(value_variance)), float("-inf"))
        log_precision = tl.where(visible, -neg_log_weight - tl.log(value_state), float("-inf"))

        new_highest = tl.maximum(highest, tl.max(score, 0))
        anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight, shrink = tl.exp(score - anchor), tl.exp(highest - anchor)
        highest = new_highest
        total = total * shrink + tl.sum(weight, 0)
        cos, sin = cosine_and_sine(lag, value_turn, dtype)
        weight = tl.where(visible, weight * value_decay, 0.0)[:, None]
        v_re, v_im = tl.where(visible[:, None], v_re, 0.0), tl.where(visible[:, None], v_im, 0.0)
        sum_re = sum_re * shrink + tl.sum(weight * (v_re * cos - v_im * sin), 0)
        sum_im = sum_im * shrink + tl.sum(weight * (v_re * sin + v_im * cos), 0)
        new_highest = tl.maximum(highest_precision, tl.max(log_precision, 0))
        anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp(highest_precision - anchor)
        precision = precision * shrink + tl.sum(tl.exp(log_precision - anchor), 0)
        highest_precision = new_highest
    at = results + ((row * H + head) * tl.num_programs(2) + split) * (SUMS + 2 * COLUMNS)
    tl.store(at, highest)
    tl.store(at + 1, total)
    tl.store(at + 2, highest_precision)
    tl.store(at + 3, precision)
    tl.store(at + SUMS + column, sum_re)
    tl.store(at + SUMS + COLUMNS + column, sum_im)


@triton.jit(do_not_specialize=["splits", "S"])
def add_splits(
    results, times, positions, read, write, now, place, mean, variance, times_slot, positions_slot, splits, S,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    VARIANCE: tl.constexpr,
):  # fmt: skip
    """Add the results of all parts of a row and key head; the first head stores times and positions."""
    dtype: tl.constexpr = results.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active, column = source >= 0, tl.arange(0, COLUMNS)
    highest, total = tl.full([], float("-inf"), dtype), tl.zeros([], dtype)
    highest_precision, precision = tl.full([], float("-inf"), dtype), tl.zeros([], dtype)
    sum_re, sum_im = tl.zeros([COLUMNS], dtype), tl.zeros([COLUMNS], dtype)
    for split in range(splits):
        at = results + ((row * H + head) * splits + split) * (SUMS + 2 * COLUMNS)
        split_highest, split_precision = tl.load(at), tl.load(at + 2)
        new_highest = tl.maximum(highest, split_highest)
        anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink, weight = tl.exp(highest - anchor), tl.exp(split_highest - anchor)
        highest = new_highest
        total = total * shrink + weight * tl.load(at + 1)
        sum_re = sum_re * shrink + weight * tl.load(at + SUMS + column)
        sum_im = sum_im * shrink + weight * tl.load(at + SUMS + COLUMNS + column)
        new_highest = tl.maximum(highest_precision, split_precision)
        anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        precision = precision * tl.exp(highest_precision - anchor)
        precision += tl.exp(split_precision - anchor) * tl.load(at + 3)
        highest_precision = new_highest
    total, precision = tl.where(active, total, 1.0), tl.where(active, precision, 1.0)
    value_head = head * R + column // D
    at = mean + (row * H * R + value_head) * 2 * D + column % D
    inside = column < R * D
    tl.store(at, tl.where(active, sum_re / total, 0.0).to(mean.dtype.element_ty), mask=inside)
    tl.store(at + D, tl.where(active, sum_im / total, 0.0).to(mean.dtype.element_ty), mask=inside)
    if VARIANCE:
        value = tl.exp(tl.minimum(-highest_precision - tl.log(precision), 87.0))
        tl.store(variance + row * H * R + value_head, tl.where(active, value, 0.0), mask=inside & (column % D == 0))
    if (head == 0) & active & (target >= 0):
        position, time = tl.load(place + row), tl.load(now + row)
        for first in range(0, S, BLOCK):
            index = first + tl.arange(0, BLOCK)
            is_new = index == position % S
            stored = (index < S) & (is_new | (source != target))
            old = tl.load(positions + source * positions_slot + index, mask=stored, other=-1)
            tl.store(positions + target * positions_slot + index, tl.where(is_new, position, old), mask=stored)
            old_time = tl.load(times + source * times_slot + index, mask=stored, other=0.0)
            tl.store(times + target * times_slot + index, tl.where(is_new, time, old_time), mask=stored)


def step(
    signals: AttendSignals,
    pool: HistoryBelief,
    slots: Slots,
    out: tuple[Tensor, Tensor | None] | None,
    variance: bool,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernels; return the mean `[B, 1, G, 2 D]`, and the variance `[B, 1, G, 1]` if requested."""
    q, k = (contiguous_width(x) for x in signals[:2])
    v = signals.v if signals.v[0].is_contiguous() else signals.v.contiguous()
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
    block = max(16, TILE // max(columns, padded))
    splits = -(-size // SPLIT)
    now = torch.empty(batch, dtype=torch.float64, device=device)
    place = torch.empty(batch, dtype=torch.int64, device=device)
    results = torch.empty(batch, heads, splits, SUMS.value + 2 * columns, dtype=dtype, device=device)
    strides = [x.stride(0) for x in pool]
    Launch(place_tokens, (batch,), (
        pool.times, pool.positions, slots.read, now if given is None else given, now, place, *strides[2:],
        0 if given is None else given.stride(0), size,
    ), {
        "BLOCK": min(TIMES, triton.next_power_of_2(size)), "GIVEN": given is not None, "num_warps": 4,
    }).run()  # fmt: skip
    Launch(attend_split, (batch, heads, splits), (
        q, k, v, *pool, *slots, now, place, results, *(x.contiguous() for x in (*keys, *values, *weighting[:3])),
        *row_strides(q), *row_strides(k), v.stride(0), *strides, size,
        size if weighting.window is None else weighting.window,
    ), {
        "H": heads, "R": group, "C": width // 2, "D": channels,
        "SHARED": signals.value_dynamics is None, "RATIONAL": weighting.rational,
        "SPLIT": SPLIT, "BLOCK": min(block, SPLIT), "CHANNELS": padded, "COLUMNS": columns, "num_warps": 4,
    }).run()  # fmt: skip
    Launch(add_splits, (batch, heads), (
        results, pool.times, pool.positions, *slots, now, place, mean, mean if read_variance is None else read_variance,
        *strides[2:], splits, size,
    ), {
        "H": heads, "R": group, "D": channels, "COLUMNS": columns,
        "BLOCK": min(TIMES, triton.next_power_of_2(size)), "VARIANCE": variance, "num_warps": 4,
    }).run()  # fmt: skip
    return mean, read_variance if variance else None
