"""Turning complex channels by what they move in a time, in Triton: the first half of a row real, the last imaginary.

Angles are reduced to less than a turn in float64, so that late times are as exact as early ones.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import load_rows, rows, store_rows

TURN = tl.constexpr(2.0 * math.pi)
SIZE = 32  # tokens of a program


@triton.jit
def cosine_and_sine(times, frequency, at, count, channel, C: tl.constexpr, SIZE: tl.constexpr):
    """Of the angles of some tokens and channels, `[SIZE, channels]`: of what is left of whole quarters of a turn, as
    series, and put back where it was. Those that Triton calls also reduce angles, which takes most of their time."""
    t = tl.arange(0, SIZE)
    time = tl.load(times + at + t, mask=t < count, other=0.0)
    turns = tl.load(frequency + channel, mask=channel < C, other=0.0).to(tl.float64) / TURN
    turned = time[:, None] * turns[None, :]
    turned = (turned - tl.floor(turned + 0.5)).to(tl.float32)
    quarters = tl.floor(4.0 * turned + 0.5)  # from -2 to 2
    x = (turned - 0.25 * quarters) * TURN
    y = x * x
    cosine = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 - y / 3628800))))
    sine = x * (1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y / 362880))))
    odd, sign = tl.abs(quarters) == 1.0, tl.where((quarters == -1.0) | (tl.abs(quarters) == 2.0), -1.0, 1.0)
    return tl.where(odd, -sign * sine, sign * cosine), tl.where(odd, sign * cosine, sign * sine)


@triton.jit(do_not_specialize=["length", "slots", "first", "H", "room", "marks", "copied"])
def turn(
    x, y, sizes, copy, times, frequency, length, slots, first, x_token, x_head, sign, H, SHARE, room, marks, copied,
    C: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute y, x turned forward (sign 1) or back (-1), and copy x if `copied`.

    `marks` says what becomes of rows whose square is not finite. 0: nothing. Else they are 0 in y, and NaN in `sizes`,
    `room` from key head to key head, which gets half the square of each row (1), or only those NaNs (2).
    """
    start, head, lane = tl.program_id(0) * SIZE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    count, channel = length - start, tl.arange(0, P)
    frequency += head // SHARE * C
    cosine, sine = cosine_and_sine(times, frequency, lane * slots + first + start, count, channel, C, SIZE)
    sine *= sign
    token = lane * length + start
    x += token * x_token + head * x_head
    y += (token * H + head) * 2 * C
    real = load_rows(x, x_token, count, channel, C, SIZE).to(tl.float32)
    imaginary = load_rows(x + C, x_token, count, channel, C, SIZE).to(tl.float32)
    turned_real = (real * cosine - imaginary * sine).to(y.dtype.element_ty)
    turned_imaginary = (imaginary * cosine + real * sine).to(y.dtype.element_ty)
    t, real_0, imaginary_0 = tl.arange(0, SIZE), turned_real.to(tl.float32), turned_imaginary.to(tl.float32)
    size = 0.5 * tl.sum(real_0 * real_0 + imaginary_0 * imaginary_0, 1)
    fine = (size < float("inf")) | (marks == 0)
    turned_real = tl.where(fine[:, None], turned_real, 0.0)
    turned_imaginary = tl.where(fine[:, None], turned_imaginary, 0.0)
    at = sizes + (lane * (H // SHARE) + head // SHARE) * room + start + t
    noted = (t < count) & ((marks == 1) | ((marks == 2) & (fine == 0)))
    tl.store(at, tl.where(fine, size, float("nan")), mask=noted)
    store_rows(y, H * 2 * C, count, channel, turned_real, C, SIZE)
    store_rows(y + C, H * 2 * C, count, channel, turned_imaginary, C, SIZE)
    if copied > 0:
        copy += (token * H + head) * 2 * C
        store_rows(copy, H * 2 * C, count, channel, real, C, SIZE)
        store_rows(copy + C, H * 2 * C, count, channel, imaginary, C, SIZE)


@triton.jit(do_not_specialize=["length", "slots", "first", "H", "room"])
def turn_back(
    to_y, still, totals, to_x, to_frequency, times, frequency, length, slots, first, y_token, y_head, sign, H, SHARE,
    room, C: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """Gradients of x, and of frequencies through the tokens of a program; forward, of x times its total.

    Forward, rows whose total is NaN get no gradient and give none. Those with a gradient that is not finite get none,
    but make that of frequencies NaN: so it stays in its row, and is noticed.

    That of frequencies is taken where nothing turns: there the products are those that were computed with. And only
    differences of times matter, so they are taken from the middle of the lane, where what cancels is small.
    """
    start, head, lane = tl.program_id(0) * SIZE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    count, channel, t = length - start, tl.arange(0, P), tl.arange(0, SIZE)
    at = lane * slots + first + start
    frequency += head // SHARE * C
    cosine, sine = cosine_and_sine(times, frequency, at, count, channel, C, SIZE)
    sine *= sign
    token = lane * length + start
    to_y += token * y_token + head * y_head
    base = (token * H + head) * 2 * C
    given = load_rows(to_y, y_token, count, channel, C, SIZE).to(tl.float32)
    given_0 = load_rows(to_y + C, y_token, count, channel, C, SIZE).to(tl.float32)
    real, imaginary = given * cosine + given_0 * sine, given_0 * cosine - given * sine
    time = tl.load(times + at + t, mask=t < count, other=0.0) - 0.5 * tl.load(times + (lane + 1) * slots - 1)
    weight = sign * time.to(tl.float32)
    if FORWARD:
        total = tl.load(totals + (lane * H + head) * room + start + t, mask=t < count, other=1.0)
        known, flaw = total == total, tl.sum(0.0 * given + 0.0 * given_0, 1)  # where it is finite, 0
        fine = (known & (flaw == 0.0))[:, None]
        real = tl.where(fine, real / total[:, None], 0.0).to(to_x.dtype.element_ty)
        imaginary = tl.where(fine, imaginary / total[:, None], 0.0).to(to_x.dtype.element_ty)
        given, given_0 = real.to(tl.float32), imaginary.to(tl.float32)
        weight = tl.where(known, weight * total + flaw, 0.0)
    store_rows(to_x + base, H * 2 * C, count, channel, real, C, SIZE)
    store_rows(to_x + base + C, H * 2 * C, count, channel, imaginary, C, SIZE)
    still_real = load_rows(still + base, H * 2 * C, count, channel, C, SIZE).to(tl.float32)
    still_imaginary = load_rows(still + base + C, H * 2 * C, count, channel, C, SIZE).to(tl.float32)
    if FORWARD:
        still_real = tl.where(known[:, None], still_real, 0.0)
        still_imaginary = tl.where(known[:, None], still_imaginary, 0.0)
    found = tl.sum((given_0 * still_real - given * still_imaginary) * weight[:, None], 0)
    part = ((lane * tl.num_programs(0) + tl.program_id(0)) * H + head) * C
    tl.store(to_frequency + part + channel, found, mask=channel < C)


def _launch(x: Tensor, times: Tensor, frequency: Tensor, forward: bool) -> tuple[tuple[int, ...], tuple, dict]:
    """The grid, what of a launch follows the tensors, and what is compiled for."""
    lanes, length, heads, width = x.shape
    slots = times.shape[1]
    grid = triton.cdiv(length, SIZE), heads, lanes
    sign, share, channels = 1.0 if forward else -1.0, heads // frequency.shape[0], width // 2
    where = (length, slots, slots - length, x.stride(1), x.stride(2), sign, heads, share)
    return grid, where, {"C": channels, "P": triton.next_power_of_2(channels), "SIZE": SIZE, "num_warps": 4}


def turned(
    x: Tensor,
    times: Tensor,
    frequency: Tensor,
    forward: bool,
    dtype: torch.dtype,
    sizes: Tensor | None = None,
    copy: Tensor | None = None,
    marks: int = 0,
) -> Tensor:
    """x `[L, T, heads, 2 C]`, by the last T of `times`, float64 `[L, S]`; frequency `[H, C]`, H dividing heads.

    Half the squares of rows are written to `sizes` `[L, heads, at least T]`, float32, its tokens contiguous, or, with
    `marks` 2, NaN where they are not finite, for `[L, H]`; such rows are 0 in y. x itself is written to `copy`,
    contiguous, unless that is empty.
    """
    x, times, frequency = rows(x), times.contiguous(), frequency.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    grid, where, compiled = _launch(x, times, frequency, forward)
    copied, room = copy is not None and copy.numel() > 0, 0 if sizes is None else sizes.stride(1)
    more = frequency if sizes is None else sizes, copy if copied else frequency
    Launch(turn, grid, (x, y, *more, times, frequency, *where, room, marks, int(copied)), compiled).run()
    return y


def turned_back(
    to_y: Tensor,
    still: Tensor,
    times: Tensor,
    frequency: Tensor,
    forward: bool,
    dtype: torch.dtype,
    parts: Tensor,
    totals: Tensor | None = None,
) -> Tensor:
    """The gradient of x; `still` is y, or, forward, x. That of frequencies is added up from `parts`: see `parts_for`.

    Forward it is x times `totals`, `[L, heads, at least T]`, whose gradient is asked for, rounded as it is returned.
    """
    to_y, still, times, frequency = rows(to_y), still.contiguous(), times.contiguous(), frequency.contiguous()
    grid, where, compiled = _launch(to_y, times, frequency, forward)
    to_x = torch.empty(still.shape, dtype=dtype, device=still.device)
    known = still if totals is None else totals
    given = (to_y, still, known, to_x, parts, times, frequency, *where, known.shape[2])
    Launch(turn_back, grid, given, compiled | {"FORWARD": forward}).run()
    return to_x


def parts_for(*given: Tensor) -> tuple[Tensor, ...]:
    """Of each x `[L, T, heads, 2 C]`, with heads and channels alike, the gradients of frequencies that its programs
    find, float32 `[L * programs, heads, C]`; after all, the same in one."""
    counts = [x.shape[0] * triton.cdiv(x.shape[1], SIZE) for x in given]
    parts = given[0].new_empty(sum(counts), given[0].shape[2], given[0].shape[3] // 2, dtype=torch.float32)
    return *parts.split(counts), parts


def summed(parts: Tensor, frequency: Tensor) -> Tensor:
    """The gradient of frequency `[H, C]`, summed in float64."""
    return parts.sum(0, dtype=torch.float64).unflatten(0, (frequency.shape[0], -1)).sum(1).to(frequency.dtype)
