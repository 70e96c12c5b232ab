"""Rotation of complex channels by frequency * time, in Triton; a row has all real parts, then all imaginary parts.

Angles are reduced to one cycle in float64, so that late times are as exact as early ones.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._attend import kv_layout
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import contiguous_rows, load_rows, store_rows

EMPTY_RANK = tl.constexpr(kv_layout.EMPTY_RANK)
TWO_PI = tl.constexpr(2.0 * math.pi)
TILE = 32  # tokens per program


@triton.jit
def cosine_and_sine(times, frequency, offset, count, channel, C: tl.constexpr, TILE: tl.constexpr):
    """Compute cosine and sine of frequency * time, `[TILE, channels]`.

    The angle is reduced to an eighth of a cycle, and a polynomial is evaluated there. The functions of Triton's library
    would reduce it again, which takes most of their time.
    """
    t = tl.arange(0, TILE)
    time = tl.load(times + offset + t, mask=t < count, other=0.0)
    cycles_per_time = tl.load(frequency + channel, mask=channel < C, other=0.0).to(tl.float64) / TWO_PI
    cycles = time[:, None] * cycles_per_time[None, :]
    cycles = (cycles - tl.floor(cycles + 0.5)).to(tl.float32)
    quarters = tl.floor(4.0 * cycles + 0.5)  # from -2 to 2
    x = (cycles - 0.25 * quarters) * TWO_PI
    y = x * x
    cosine = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 - y / 3628800))))
    sine = x * (1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y / 362880))))
    odd, sign = tl.abs(quarters) == 1.0, tl.where((quarters == -1.0) | (tl.abs(quarters) == 2.0), -1.0, 1.0)
    return tl.where(odd, -sign * sine, sign * cosine), tl.where(odd, sign * cosine, sign * sine)


@triton.jit
def in_sequence(rank, offset, count, masked, TILE: tl.constexpr):
    """Return which of the tokens from `offset` on belong to a sequence; all of them unless `masked`."""
    t = tl.arange(0, TILE)
    return tl.load(rank + offset + t, mask=(t < count) & (masked > 0), other=0) > EMPTY_RANK


@triton.jit(do_not_specialize=["length", "slots", "first", "H", "masked", "padded_tokens", "nonfinite_mode", "copy_kv"])
def rotate_kernel(
    x, y, norms, copy, times, rank, frequency, length, slots, first, x_token, x_head, sign, H, GROUP_SIZE, masked,
    padded_tokens, nonfinite_mode, copy_kv,
    C: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute y, x rotated forward (sign 1) or back (-1); copy x to `copy` if `copy_kv`.

    `nonfinite_mode` 0 leaves rows with a non-finite squared norm as they are. Otherwise they are 0 in y and NaN in
    `norms`, whose key heads are `padded_tokens` apart. Mode 1 writes half the squared norm of every row to `norms`,
    mode 2 only the NaN. If `masked`, tokens of no sequence are read as 0.
    """
    start, head, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    count, channel = length - start, tl.arange(0, P)
    frequency += head // GROUP_SIZE * C
    offset = row * slots + first + start
    cosine, sine = cosine_and_sine(times, frequency, offset, count, channel, C, TILE)
    sine *= sign
    occupied = in_sequence(rank, offset, count, masked, TILE)[:, None]
    token = row * length + start
    x += token * x_token + head * x_head
    y += (token * H + head) * 2 * C
    real = tl.where(occupied, load_rows(x, x_token, count, channel, C, TILE).to(tl.float32), 0.0)
    imaginary = tl.where(occupied, load_rows(x + C, x_token, count, channel, C, TILE).to(tl.float32), 0.0)
    rotated_real = (real * cosine - imaginary * sine).to(y.dtype.element_ty)
    rotated_imaginary = (imaginary * cosine + real * sine).to(y.dtype.element_ty)
    t = tl.arange(0, TILE)
    rounded_real, rounded_imaginary = rotated_real.to(tl.float32), rotated_imaginary.to(tl.float32)
    norm = 0.5 * tl.sum(rounded_real * rounded_real + rounded_imaginary * rounded_imaginary, 1)
    finite = (norm < float("inf")) | (nonfinite_mode == 0)
    rotated_real = tl.where(finite[:, None], rotated_real, 0.0)
    rotated_imaginary = tl.where(finite[:, None], rotated_imaginary, 0.0)
    norm_ptr = norms + (row * (H // GROUP_SIZE) + head // GROUP_SIZE) * padded_tokens + start + t
    write_norm = (t < count) & ((nonfinite_mode == 1) | ((nonfinite_mode == 2) & (finite == 0)))
    tl.store(norm_ptr, tl.where(finite, norm, float("nan")), mask=write_norm)
    store_rows(y, H * 2 * C, count, channel, rotated_real, C, TILE)
    store_rows(y + C, H * 2 * C, count, channel, rotated_imaginary, C, TILE)
    if copy_kv > 0:
        copy += (token * H + head) * 2 * C
        store_rows(copy, H * 2 * C, count, channel, real, C, TILE)
        store_rows(copy + C, H * 2 * C, count, channel, imaginary, C, TILE)


@triton.jit(do_not_specialize=["length", "slots", "first", "H", "masked", "padded_tokens"])
def rotate_backward_kernel(
    grad_y, x, scale, grad_x, grad_frequency, times, rank, frequency, length, slots, first, y_token, y_head, sign, H,
    GROUP_SIZE, masked, padded_tokens,
    C: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x, and the gradient of frequencies through the tokens of this program.

    If `FORWARD`, the gradient is that of x * scale. Rows whose scale is NaN then get a gradient of 0 and add nothing to
    that of frequencies. Rows with a non-finite upstream gradient get a gradient of 0 and make that of frequencies NaN,
    so that the error is contained and yet visible. If `masked`, upstream gradients of tokens of no sequence are read
    as 0.

    The gradient of frequencies is computed from rotated vectors, the factors of the matrix products. It depends only on
    differences of times. Times are measured from the middle of the row, which makes the cancelling terms small.
    """
    start, head, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    count, channel, t = length - start, tl.arange(0, P), tl.arange(0, TILE)
    offset = row * slots + first + start
    frequency += head // GROUP_SIZE * C
    cosine, sine = cosine_and_sine(times, frequency, offset, count, channel, C, TILE)
    sine *= sign
    token = row * length + start
    grad_y += token * y_token + head * y_head
    base = (token * H + head) * 2 * C
    occupied = in_sequence(rank, offset, count, masked, TILE)[:, None]
    grad_real = tl.where(occupied, load_rows(grad_y, y_token, count, channel, C, TILE).to(tl.float32), 0.0)
    grad_imaginary = tl.where(occupied, load_rows(grad_y + C, y_token, count, channel, C, TILE).to(tl.float32), 0.0)
    real, imaginary = grad_real * cosine + grad_imaginary * sine, grad_imaginary * cosine - grad_real * sine
    time = tl.load(times + offset + t, mask=t < count, other=0.0) - 0.5 * tl.load(times + (row + 1) * slots - 1)
    weight = sign * time.to(tl.float32)
    if FORWARD:
        row_scale = tl.load(scale + (row * H + head) * padded_tokens + start + t, mask=t < count, other=1.0)
        valid = row_scale == row_scale
        nonfinite = tl.sum(0.0 * grad_real + 0.0 * grad_imaginary, 1)  # 0 where all are finite, else NaN
        finite = (valid & (nonfinite == 0.0))[:, None]
        real = tl.where(finite, real / row_scale[:, None], 0.0).to(grad_x.dtype.element_ty)
        imaginary = tl.where(finite, imaginary / row_scale[:, None], 0.0).to(grad_x.dtype.element_ty)
        grad_real, grad_imaginary = real.to(tl.float32), imaginary.to(tl.float32)
        weight = tl.where(valid, weight * row_scale + nonfinite, 0.0)
    store_rows(grad_x + base, H * 2 * C, count, channel, real, C, TILE)
    store_rows(grad_x + base + C, H * 2 * C, count, channel, imaginary, C, TILE)
    x_real = load_rows(x + base, H * 2 * C, count, channel, C, TILE).to(tl.float32)
    x_imaginary = load_rows(x + base + C, H * 2 * C, count, channel, C, TILE).to(tl.float32)
    if FORWARD:
        x_real = tl.where(valid[:, None], x_real, 0.0)
        x_imaginary = tl.where(valid[:, None], x_imaginary, 0.0)
    grad_sum = tl.sum((grad_imaginary * x_real - grad_real * x_imaginary) * weight[:, None], 0)
    offset_out = ((row * tl.num_programs(0) + tl.program_id(0)) * H + head) * C
    tl.store(grad_frequency + offset_out + channel, grad_sum, mask=channel < C)


def _launch(
    x: Tensor, times: Tensor, frequency: Tensor, forward: bool, masked: bool
) -> tuple[tuple[int, ...], tuple, dict]:
    """Return the grid, the arguments after the tensors, and the constexpr arguments of a launch."""
    num_rows, length, heads, width = x.shape
    slots = times.shape[1]
    grid = -(-length // TILE), heads, num_rows
    sign, group_size, channels = 1.0 if forward else -1.0, heads // frequency.shape[0], width // 2
    launch_args = (length, slots, slots - length, x.stride(1), x.stride(2), sign, heads, group_size, int(masked))
    return grid, launch_args, {"C": channels, "P": 1 << (channels - 1).bit_length(), "TILE": TILE, "num_warps": 4}


def rotate(
    x: Tensor,
    times: Tensor,
    rank: Tensor,
    frequency: Tensor,
    forward: bool,
    masked: bool,
    dtype: torch.dtype,
    norms: Tensor | None = None,
    copy: Tensor | None = None,
    nonfinite_mode: int = 0,
) -> Tensor:
    """Rotate x by frequency * time, or back if not `forward`.

    Args:
        x: `[R, T, heads, 2 C]`.
        times: float64 `[R, S]`, of which the last T are those of x.
        rank: int64 `[R, S]`, contiguous.
        frequency: `[H, C]`; H divides heads.
        forward: sign of the angle.
        masked: treat tokens whose rank is that of an empty slot as 0.
        dtype: dtype of the result.
        norms: float32 `[R, H, at least T]`, contiguous in tokens; receives half the squared norms of rows.
        copy: contiguous tensor that receives x, unless it is empty.
        nonfinite_mode: treatment of rows whose squared norm is not finite; see `rotate_kernel`.
    """
    x, times, frequency = contiguous_rows(x), times.contiguous(), frequency.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    grid, launch_args, compiled = _launch(x, times, frequency, forward, masked)
    copy_x, padded_tokens = copy is not None and copy.numel() > 0, 0 if norms is None else norms.stride(1)
    outputs = frequency if norms is None else norms, copy if copy_x else frequency
    Launch(
        rotate_kernel,
        grid,
        (x, y, *outputs, times, rank, frequency, *launch_args, padded_tokens, nonfinite_mode, int(copy_x)),
        compiled,
    ).run()
    return y


def rotate_backward(
    grad_y: Tensor,
    x: Tensor,
    times: Tensor,
    rank: Tensor,
    frequency: Tensor,
    forward: bool,
    masked: bool,
    dtype: torch.dtype,
    frequency_grads: Tensor,
    scale: Tensor | None = None,
) -> Tensor:
    """Return the gradient of x, and write partial gradients of frequencies to `frequency_grads`.

    Args:
        grad_y: gradient of the result of `rotate`.
        x: the input of `rotate` if `forward`, else its result.
        times: as in `rotate`.
        rank: as in `rotate`.
        frequency: as in `rotate`.
        forward: as in `rotate`.
        masked: treat the gradients of tokens whose rank is that of an empty slot as 0.
        dtype: dtype of the gradient.
        frequency_grads: a buffer from `frequency_grad_buffers`.
        scale: if `forward`, return the gradient of x * scale instead; `[R, heads, at least T]`.
    """
    grad_y, x, times, frequency = contiguous_rows(grad_y), x.contiguous(), times.contiguous(), frequency.contiguous()
    grid, launch_args, compiled = _launch(grad_y, times, frequency, forward, masked)
    grad_x = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale_or_x = x if scale is None else scale
    args = (grad_y, x, scale_or_x, grad_x, frequency_grads, times, rank, frequency, *launch_args, scale_or_x.shape[2])
    Launch(rotate_backward_kernel, grid, args, compiled | {"FORWARD": forward}).run()
    return grad_x


def frequency_grad_buffers(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Allocate buffers for the partial gradients of frequencies, float32 `[R * programs, heads, C]`, one per tensor.

    The tensors are `[R, T, heads, 2 C]` with the same heads and channels. The last item is the concatenation of all.
    """
    counts = [x.shape[0] * -(-x.shape[1] // TILE) for x in tensors]
    buffers = tensors[0].new_empty(sum(counts), tensors[0].shape[2], tensors[0].shape[3] // 2, dtype=torch.float32)
    return *buffers.split(counts), buffers


def sum_frequency_grads(buffers: Tensor, frequency: Tensor) -> Tensor:
    """Sum partial gradients in float64 to the gradient of frequency `[H, C]`."""
    by_group = buffers.unflatten(1, (frequency.shape[0], -1))
    return by_group.sum((0, 2), dtype=torch.float64).to(frequency.dtype)
