"""Triton kernels of the step of softmax attention: one query for each row and head, in place on a pool of histories.

Two kernels run. The first attends to the past tokens of a history, in parts of equal length: one part and key head,
with all query heads that share it, per program. The second adds the results of all parts and the token itself, and
stores the token. Both normalise and rotate the heads that they need. The newest tokens of a sequence are in a ring
without gaps, so a program finds the position of the next token from a few entries of the ring.
"""

from __future__ import annotations

from math import e, isqrt, log2
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.dispatch import LEAST_ROWS
from kalmix.layers.fused.triton.rotary_step import rotation
from kalmix.ops._shared.triton.compile_and_launch import Launch

if TYPE_CHECKING:
    from kalmix.layers.fused.attention_step import RotaryHeads

# A batch with fewer rows and key heads than PROGRAMS divides histories into parts, unless more than WARPS would run.
PROGRAMS, WARPS = 2048, 4096
PARTS = 128  # parts of a history at most
LEAST = 16  # tokens of a part at least, if the history is full
TILE = 1024  # elements of a tile of keys or values of the first kernel, for all query heads that share them
ELEMENTS_PER_WARP = 1024  # elements of a tile for each warp
SUMS = tl.constexpr(2)  # numbers of a part's result before its sums of values


@triton.jit
def find_position(positions, source, positions_slot, S, PROBES: tl.constexpr):
    """Return the position of the next token of a ring: entries before the newest token have lower positions."""
    active, probe = source >= 0, tl.arange(0, PROBES)
    stride = (S + PROBES - 1) // PROBES
    positions += source * positions_slot
    last = tl.max(tl.load(positions + probe * stride, mask=(probe * stride < S) & active, other=-1), 0)
    first = tl.maximum(last, 0) % S
    newest = tl.full([PROBES], -1, tl.int64)
    for start in range(0, stride, PROBES):
        index = first + start + probe
        inside = (start + probe < stride) & (index < S) & active
        newest = tl.maximum(newest, tl.load(positions + index, mask=inside, other=-1))
    return tl.max(newest, 0) + 1


@triton.jit
def rotated_heads(
    x, weight, position, eps, active,
    W: tl.constexpr, ROOT: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load heads next to each other, and return their RMS norms rotated by a position, float32 `[REPEAT, WIDTH]`.

    `HEADS` of the rows are heads.
    """
    head, column = tl.arange(0, REPEAT), tl.arange(0, WIDTH)
    other = (column + W // 2) % W
    cos, sin = rotation(position, W, ROOT, WIDTH)
    inside = ((head < HEADS)[:, None] & (column < W)[None, :]) & active
    at = x + head[:, None] * W
    own = tl.load(at + column[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(at + other[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(own * own, 1) / W + eps)
    own *= tl.load(weight + column, mask=column < W, other=0.0).to(tl.float32)[None, :]
    partner *= tl.load(weight + other, mask=column < W, other=0.0).to(tl.float32)[None, :]
    return (own * cos[None, :] + partner * sin[None, :]) * scale[:, None]


@triton.jit
def copy_ring(
    keys, values, positions, source, target, head, part, parts, keys_slot, values_slot, positions_slot, S,
    G: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy a part of a history, one key head of it, to another slot; the first head copies positions."""
    column = tl.arange(0, WIDTH)
    for first in range(part * BLOCK, S, parts * BLOCK):
        index = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = index < S
        at, mask = (index * G + head)[:, None] * W + column[None, :], inside[:, None] & (column < W)[None, :]
        tl.store(keys + target * keys_slot + at, tl.load(keys + source * keys_slot + at, mask=mask), mask=mask)
        tl.store(values + target * values_slot + at, tl.load(values + source * values_slot + at, mask=mask), mask=mask)
        inside = inside & (head == 0)
        position = tl.load(positions + source * positions_slot + index, mask=inside)
        tl.store(positions + target * positions_slot + index, position, mask=inside)


@triton.jit
def part_length(position, S, parts, block):
    """Return the number of past tokens that a query attends to, and the number of tokens of a part."""
    past = tl.minimum(position, S - 1).to(tl.int32)
    blocks = (past + block - 1) // block
    return past, (blocks + parts - 1) // parts * block


@triton.jit(do_not_specialize=["S"])
def attend_part(
    x, query_weight, keys, values, positions, read, write, place, results,
    x_row, keys_slot, values_slot, positions_slot, S, eps,
    G: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ROOT: tl.constexpr, SCALE: tl.constexpr,
    REPEAT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Attend to a part of the past tokens with the query heads of a key head. The last past token has age 1."""
    row, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    position = find_position(positions, source, positions_slot, S, PROBES)
    if (group == 0) & (part == 0):
        tl.store(place + row, position)
    past, length = part_length(position, S, tl.num_programs(2), BLOCK)
    start, stop = part * length, tl.minimum((part + 1) * length, past)
    head, column = tl.arange(0, REPEAT), tl.arange(0, WIDTH)
    if (source >= 0) & (start < stop):
        newest = (position % S).to(tl.int32)
        q = rotated_heads(
            x + row * x_row + group * (R * W), query_weight, position, eps, source >= 0, W, ROOT, R, REPEAT, WIDTH
        )
        q = (q * SCALE)[:, None, :]
        at_key = keys + source * keys_slot + group * W + column[None, None, :]
        at_value = values + source * values_slot + group * W + column[None, None, :]
        has_column = (column < W)[None, None, :]
        # Each row of a tile has its own sums, so that no iteration reduces over rows.
        highest, total = tl.full([REPEAT, BLOCK], float("-inf"), tl.float32), tl.zeros([REPEAT, BLOCK], tl.float32)
        sums = tl.zeros([REPEAT, BLOCK, WIDTH], tl.float32)
        for first in range(start, stop, BLOCK):
            age = first + 1 + tl.arange(0, BLOCK)
            inside = age <= stop
            index = newest - age
            index = tl.where(index < 0, index + S, index).to(tl.int64) * (G * W)
            mask = inside[None, :, None] & has_column
            k = tl.load(at_key + index[None, :, None], mask=mask, other=0.0).to(tl.float32)
            v = tl.load(at_value + index[None, :, None], mask=mask, other=0.0).to(tl.float32)
            score = tl.where(inside[None, :], tl.sum(q * k, 2), float("-inf"))
            new_highest = tl.maximum(highest, score)
            anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weight, shrink = tl.exp2(score - anchor), tl.exp2(highest - anchor)
            highest = new_highest
            total = total * shrink + weight
            sums = sums * shrink[:, :, None] + weight[:, :, None] * v
        top = tl.max(highest, 1)
        shrink = tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top)[:, None])
        at = ((row * G + group) * tl.num_programs(2) + part) * R + head
        at, inside = results + at * (SUMS + W), head < R
        tl.store(at, top, mask=inside)
        tl.store(at + 1, tl.sum(total * shrink, 1), mask=inside)
        sums = tl.sum(sums * shrink[:, :, None], 1)
        tl.store(at[:, None] + SUMS + column[None, :], sums, mask=inside[:, None] & (column < W)[None, :])
    if (source >= 0) & (target >= 0) & (source != target):
        copy_ring(
            keys, values, positions, source, target, group, part, tl.num_programs(2),
            keys_slot, values_slot, positions_slot, S, G, W, BLOCK, WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "block", "S"])
def add_parts(
    x, query_weight, key_weight, keys, values, positions, read, write, place, results, output,
    x_row, keys_slot, values_slot, positions_slot, S, parts, block, query_eps, key_eps,
    G: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ROOT: tl.constexpr, SCALE: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the token itself and the results of all parts of a row and query head; store the token."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    active, group, column = source >= 0, head // R, tl.arange(0, WIDTH)
    position = tl.load(place + row)
    x += row * x_row
    q = rotated_heads(x + head * W, query_weight, position, query_eps, active, W, ROOT, 1, 1, WIDTH)
    k = rotated_heads(x + (G * R + group) * W, key_weight, position, key_eps, active, W, ROOT, 1, 1, WIDTH)
    k = k.to(keys.dtype.element_ty)
    inside = (column < W) & active
    v = tl.load(x + (G * R + G + group) * W + column, mask=inside, other=0.0)
    own_score = tl.sum(tl.sum(q * k.to(tl.float32), 1), 0) * SCALE

    part = tl.arange(0, PARTS)
    past, length = part_length(position, S, parts, block)
    used = (part < parts) & (part * length < past) & active
    at = results + (((row * G + group) * parts + part) * R + head % R) * (SUMS + W)
    top = tl.load(at, mask=used, other=float("-inf"))
    total = tl.load(at + 1, mask=used, other=0.0)
    mask = used[:, None] & (column < W)[None, :]
    sums = tl.load(at[:, None] + SUMS + column[None, :], mask=mask, other=0.0)
    highest = tl.maximum(tl.max(top, 0), own_score)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    factor, own = tl.exp2(top - anchor), tl.exp2(own_score - anchor)
    total = tl.where(active, tl.sum(total * factor, 0) + own, 1.0)
    mean = (tl.sum(sums * factor[:, None], 0) + own * v.to(tl.float32)) / total
    mean = tl.where(active, mean, 0.0).to(output.dtype.element_ty)
    tl.store(output + (row * (G * R) + head) * W + column, mean, mask=column < W)

    stored, newest = inside & (target >= 0) & (head % R == 0), position % S
    at = (newest * G + group) * W + column
    tl.store(keys + target * keys_slot + at, tl.reshape(k, [WIDTH]), mask=stored)
    tl.store(values + target * values_slot + at, v.to(values.dtype.element_ty), mask=stored)
    tl.store(positions + target * positions_slot + newest, position, mask=active & (target >= 0) & (head == 0))


def count_parts(batch: int, kv_heads: int, size: int, warps: int) -> int:
    """Return the number of parts of the histories of a batch.

    Args:
        batch: rows.
        kv_heads: key heads.
        size: tokens for which a slot has room.
        warps: warps of a program.
    """
    return max(1, min(PARTS, size // LEAST, min(PROGRAMS, WARPS // warps) // (batch * kv_heads)))


def step(x: Tensor, norms: list[Tensor], pool: list[Tensor], slots: list[Tensor], heads: RotaryHeads) -> Tensor:
    """Launch the kernels; return the outputs of all query heads, `[B, 1, heads W]`. See `attention_step`."""
    batch, width, groups = x.shape[0], heads.width, heads.kv_heads
    size, repeat = pool[2].shape[1], heads.heads // groups
    padded, rows = max(16, triton.next_power_of_2(width)), triton.next_power_of_2(repeat)
    block = max(LEAST_ROWS, TILE // (rows * padded))
    warps = min(8, max(1, rows * block * padded // ELEMENTS_PER_WARP))
    parts = count_parts(batch, groups, size, warps)
    output = torch.empty(batch, 1, heads.heads * width, dtype=x.dtype, device=x.device)
    place = torch.empty(batch, dtype=torch.int64, device=x.device)
    results = torch.empty(batch, groups, parts, repeat, SUMS.value + width, dtype=torch.float32, device=x.device)
    strides = x.stride(0), *(y.stride(0) for y in pool)
    options = {
        "G": groups, "R": repeat, "W": width, "ROOT": heads.rotary_base ** (-2 / width),
        "SCALE": log2(e) * width**-0.5, "WIDTH": padded,  # scores are logarithms to base 2
    }  # fmt: skip
    probes = min(1024, max(32, triton.next_power_of_2(isqrt(size))))
    Launch(attend_part, (batch, groups, parts), (
        x, norms[0], *pool, *slots, place, results, *strides, size, heads.query_eps,
    ), {**options, "REPEAT": rows, "BLOCK": block, "PROBES": probes, "num_warps": warps}).run()  # fmt: skip
    Launch(add_parts, (batch, heads.heads), (
        x, *norms, *pool, *slots, place, results, output, *strides, size, parts, block,
        heads.query_eps, heads.key_eps,
    ), {**options, "PARTS": triton.next_power_of_2(parts), "num_warps": 2 if parts <= 16 else 4}).run()  # fmt: skip
    return output
