"""Rotary positions of one token: one program rotates queries and keys of a row and counts the token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._shared.triton.compile_and_launch import Launch

TURN = tl.constexpr(6.283185307179586)


@triton.jit
def rotation(position, W: tl.constexpr, ROOT: tl.constexpr, WIDTH: tl.constexpr):
    """Return cosines and signed sines `[WIDTH]` by which the columns of a head and their partners are multiplied.

    Columns j and j + W / 2 are partners and rotate by `ROOT`^j radians per position; angles are in float64.
    """
    column = tl.arange(0, WIDTH)
    half: tl.constexpr = W // 2
    pair = column % half
    turn, power = tl.full([WIDTH], 1.0, tl.float64), tl.full([WIDTH], ROOT, tl.float64)
    for bit in tl.static_range(16):
        if half > (1 << bit):
            turn = tl.where(((pair >> bit) & 1) != 0, turn * power, turn)
            power = power * power
    angle = turn * position.to(tl.float64)
    angle = (angle - TURN * tl.floor(angle / TURN + 0.5)).to(tl.float32)
    sin = tl.sin(angle)
    return tl.cos(angle), tl.where(column < half, -sin, sin)


@triton.jit
def rotate_kernel(
    q, k, count, read, write, q_out, k_out, q_row, q_head, k_row, k_head,
    H: tl.constexpr, W: tl.constexpr, ROOT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of a row by the number of past tokens, and add 1 to it."""
    row, head, column = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active = source >= 0
    position = tl.load(count + source, mask=active, other=0)
    cos, sin = rotation(position, W, ROOT, WIDTH)
    other, inside = (column + W // 2) % W, ((head < H) & (column < W)[None, :]) & active
    at, stored = (row * H + head) * W + column[None, :], (head < H) & (column < W)[None, :]
    x = q + row * q_row + head * q_head
    own = tl.load(x + column[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x + other[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = own * cos[None, :] + partner * sin[None, :]
    tl.store(q_out + at, rotated.to(q_out.dtype.element_ty), mask=stored)
    x = k + row * k_row + head * k_head
    own = tl.load(x + column[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x + other[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = own * cos[None, :] + partner * sin[None, :]
    tl.store(k_out + at, rotated.to(k_out.dtype.element_ty), mask=stored)
    tl.store(count + target, position + 1, mask=active & (target >= 0))


def rotate(q: Tensor, k: Tensor, count: Tensor, read: Tensor, write: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Launch the kernel; see `rotary_step`."""
    batch, _, heads, width = q.shape
    q_out, k_out = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    rows, padded = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    Launch(rotate_kernel, (batch,), (
        q, k, count, read, write, q_out, k_out, q.stride(0), q.stride(2), k.stride(0), k.stride(2),
    ), {
        "H": heads, "W": width, "ROOT": base ** (-2 / width), "HEADS": rows, "WIDTH": padded,
        "num_warps": min(16, max(1, rows * padded // 256)),
    }).run()  # fmt: skip
    return q_out, k_out
