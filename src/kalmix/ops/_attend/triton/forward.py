"""`attend` in Triton, forward: the softmax of flash attention, with scores that fall as powers of distances.

Tokens that are not finite are 0, but for their sizes, which are NaN: so they reach no score but those of queries that
see them, and these read NaN. Backwards such queries count for nothing.

A program has a tile of queries, and goes through keys: first whole blocks before its own, whose lags are put together
from those of their tokens (see `triton_lanes`), then those next to it. Keys that no query sees are left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from kalmix.ops._attend.block_sizes import block_size, split_value_width
from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._attend.triton.block_masks import (
    LOOSE,
    all_seen,
    block_ranks,
    blocks_in_sight,
    hidden,
    meet,
    rows_of,
    surveyed,
    tokens_of,
    way_between,
)
from kalmix.ops._attend.triton.rotary import turned
from kalmix.ops._attend.triton.scores import LN2, LOG2E, load_model, precisions, scored
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import hardware
from kalmix.ops._shared.triton.tiles import load_rows, precision, product, store_rows

SMALL = {"M": 16, "N": 16, "STAGES": 1, "num_warps": 1}  # a launch for few tokens
LEAST = tl.constexpr(-3e38)  # below every score


@triton.jit
def reach(weight, score, far, lag, ahead, model, CAUSAL: tl.constexpr):
    """Weights, 2^score, times the decay of values; ahead of a query that is more than 1, if their product is not."""
    if CAUSAL:
        reached = weight * far[0]
    else:
        log_reach = LOG2E * model[1][0] * lag[0]
        reached = tl.exp2(score + tl.where(ahead, log_reach, -log_reach))
    return reached


@triton.jit
def take(
    read, total, top, sure, query, asking, k, v, times, rank, kept, way, kept_ranks, first, high, low,
    slots, kept_blocks, window, H, G, model,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sums of a tile of queries, with the keys from `first` on added.

    Weights are 2^(score - top), with tops whole numbers: so the same weight has the same digits whatever the top, and
    the backward pass, which knows the last top, rounds reached weights as they were rounded here.
    """
    first = tl.multiple_of(first, N)
    token = tl.cast(first, tl.int64)
    count = slots - first if DIRECT else N  # before the last block all slots are there
    key = load_rows(k + token * H * K, H * K, count, tl.arange(0, P), K, N)
    gram = product(query, tl.trans(key), PRECISION)
    block = first // BLOCK
    held = tokens_of(kept, times, rank, first + tl.arange(0, N), 0, kept_blocks * BLOCK, slots, 0, SHARED)
    near, far, _lag, lag, ahead = meet(asking, held, way, model, DIRECT, True, CAUSAL, SHARED, PTX)
    found = scored(gram, asking[0], held[0], near, far, ahead, lag[0], model, SHARED, RATIONAL, CAUSAL, PTX)
    whole = False
    if MASKED:
        high_0, low_0 = block_ranks(kept_ranks, block)
        whole = all_seen(high, low, high_0, low_0, window, CAUSAL)
    cost = hidden(found[0], float("inf"), asking, held, whole, slots, window, DIRECT, MASKED, CAUSAL)
    before, top = top, tl.maximum(top, tl.ceil(model[3] * tl.min(cost, 1)))
    score = model[3] * cost - top[:, None]
    weight, left = tl.exp2(score), tl.exp2(before - top)
    total = total * left + tl.sum(weight, 1)
    value = load_rows(v + token * G * V, G * V, count, tl.arange(0, W), V, N)
    reached = reach(weight, score, far, lag, ahead, model, CAUSAL)
    read = product(reached.to(value.dtype), value, PRECISION, read * left[:, None])
    if VARIANCE:
        added = precisions(found, near, far, ahead, model, RATIONAL, CAUSAL, PTX)
        sure += tl.sum(tl.where(score > float("-inf"), added, 0.0), 1)
    return read, total, top, sure


@triton.jit(do_not_specialize=LOOSE)
def average(
    q, k, v, times, rank, asked, starts, asked_ranks, kept, ends, kept_ranks, numbers, read_out, tops, totals,
    precision, tokens, slots, asked_blocks, kept_blocks, window, H, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    VARIANCE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a tile of queries reads, one lane and value head; the longest tiles first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    value_head, lane = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, start, past = value_head // SHARE, tile * M, slots - tokens
    model = load_model(numbers, head, H)
    place = (lane * tokens + start) * G + value_head
    q += ((lane * tokens + start) * H + head) * K
    k += (lane * slots * H + head) * K
    v += (lane * slots * G + value_head) * V
    times += lane * slots
    rank += lane * slots
    at, block = start + tl.arange(0, M), start // BLOCK
    room = asked_blocks * BLOCK
    asked += (lane * H + head) * rows_of(SHARED) * room
    kept += (lane * H + head) * rows_of(SHARED) * kept_blocks * BLOCK
    starts += lane * asked_blocks + block
    ends += lane * kept_blocks
    kept_ranks += lane * kept_blocks * 2
    query = load_rows(q, H * K, tokens - start, tl.arange(0, P), K, M)
    asking = tokens_of(asked, times, rank, at, past, room, slots, 1, SHARED)
    read, sure = tl.zeros([M, W], tl.float32), tl.zeros([M], tl.float32)
    total, top = tl.zeros([M], tl.float32), tl.full([M], LEAST, tl.float32)
    begin, stop, near = 0, slots, 0
    if CAUSAL:
        stop, near = tl.minimum(past + start + M, slots), (past + block * BLOCK) // BLOCK * BLOCK
    high, low = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if MASKED:
        high, low = block_ranks(asked_ranks + lane * asked_blocks * 2, block)
        from_block, to_block = blocks_in_sight(kept_ranks, high, low, kept_blocks, window, False, CAUSAL)
        begin, stop = from_block * BLOCK, tl.minimum(stop, to_block * BLOCK)
    CLOSE: tl.constexpr = N // 2 if N > 16 else N  # so much more is there to say of a pair whose lag is computed anew
    if CAUSAL:
        way = way_between(starts, ends + tl.minimum(begin // BLOCK, kept_blocks - 1), model, SHARED, PTX)
        for first in tl.range(begin, near, N, num_stages=STAGES):
            read, total, top, sure = take(
                read, total, top, sure, query, asking, k, v, times, rank, kept, way, kept_ranks, first, high,
                low, slots, kept_blocks, window, H, G, model, K, P, V, W, BLOCK, N, SHARED, RATIONAL,
                CAUSAL, MASKED, VARIANCE, False, PRECISION, PTX,
            )  # fmt: skip
            # A tile early: it takes long to find.
            way = way_between(starts, ends + (first + N) // BLOCK, model, SHARED, PTX)
    for first in tl.range(tl.maximum(begin, near), stop, CLOSE, num_stages=2):
        read, total, top, sure = take(
            read, total, top, sure, query, asking, k, v, times, rank, kept, None, kept_ranks, first, high,
            low, slots, kept_blocks, window, H, G, model, K, P, V, W, BLOCK, CLOSE, SHARED, RATIONAL,
            CAUSAL, MASKED, VARIANCE, True, PRECISION, PTX,
        )  # fmt: skip
    total = tl.where(at < tokens, total, 1.0)
    known = total == total  # else a token that is not finite is seen: under such a top backwards, all weights are 0
    store_rows(read_out + place * V, G * V, tokens - start, tl.arange(0, W), read / total[:, None], V, M)
    row = (lane * G + value_head) * room + at
    tl.store(tops + row, tl.where((at < tokens) & known, top, -LEAST))
    tl.store(totals + row, total)
    if VARIANCE:
        row = (lane * tokens + at) * H + head
        certainty = tl.where(known, LN2 * tl.log2(sure), total)
        tl.store(precision + row, certainty, mask=(at < tokens) & (value_head % SHARE == 0))


class Shape(NamedTuple):
    """How the kernels of a call are launched.

    Attributes:
        grid: what follows the number of tiles: value heads, lanes.
        sizes: the numbers that follow a kernel's tensors.
        compiled: what all kernels compile for.
    """

    grid: tuple[int, int]
    sizes: tuple[int, ...]
    compiled: dict[str, Any]


def shape_of(q: Tensor, k: Tensor, v: Tensor, rules: ScoreConfig, masked: bool, variance: bool) -> Shape:
    (count, tokens, heads, width), (_, slots, own, value_width) = q.shape, v.shape
    block = block_size(slots)
    blocks = (triton.cdiv(tokens, block), triton.cdiv(slots, block))
    sizes = (tokens, slots, *blocks, rules.window, heads, own, own // heads)
    compiled = {
        "K": width, "P": max(16, triton.next_power_of_2(width)),
        "V": value_width, "W": max(16, triton.next_power_of_2(value_width)),
        "BLOCK": block, "SHARED": rules.shared_dynamics, "RATIONAL": rules.rational, "CAUSAL": rules.causal,
        "MASKED": masked, "VARIANCE": variance, "PRECISION": precision(k.dtype), "PTX": hardware(),
    }  # fmt: skip
    return Shape((own, count), sizes, compiled)


def tiles_ahead(compiled: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """Queries and keys of a tile, by what of the widest rows registers and shared memory hold.

    In float32 never 64 rows for 8 warps, two groups of which would share them: Triton 3.6 then has products read past
    the end of shared memory.
    """
    wide = max(compiled["P"], compiled["W"])
    if compiled["BLOCK"] == 16:
        return SMALL
    if dtype == torch.float32:
        return {"M": 128, "N": 32, "STAGES": 1, "num_warps": 8}
    simple = wide <= 128 and compiled["SHARED"] and not compiled["VARIANCE"]
    return {"M": 128, "N": 64 if simple else 32, "STAGES": 4 if simple else 2, "num_warps": 8}


def forward(
    q: Tensor, k: Tensor, v: Tensor, frequency: Tensor, frequency_of_values: Tensor, times: Tensor, rank: Tensor,
    numbers: Tensor, rules: ScoreConfig, masked: bool, variance: bool, copied: bool, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The mean; log of the precision; keys and values in float32 where `copied`; and, kept: what is read before it is
    turned back, float32, and q, k and v as they are turned, in `dtype`, values and what is read in strips; tops and
    sums of weights; surveys of queries and keys."""
    single = {"dtype": torch.float32, "device": k.device}
    copies = [torch.empty(x.shape if copied else (0,), **single) for x in (k, v)]
    times, rank, numbers = (x.contiguous() for x in (times, rank, numbers))
    block, strips, width = block_size(k.shape[1]), *split_value_width(v.shape[3], dtype)
    asked = surveyed(q, times, rank, numbers, block, False, rules.shared_dynamics)
    kept = surveyed(k, times, rank, numbers, block, True, rules.shared_dynamics)
    q = turned(q, times, frequency, False, dtype, asked.sizes, marks=1)
    k = turned(k, times, frequency, False, dtype, kept.sizes, copies[0], marks=1)
    value = turned(v, times, frequency_of_values, False, dtype, kept.sizes, copies[1], marks=2)
    spare = strips * width - v.shape[3]
    value = (pad(value, (0, spare)) if spare else value).unflatten(3, (strips, width)).flatten(2, 3)
    s, tokens = shape_of(q, k, value, rules, masked, variance), q.shape[1]
    read = torch.empty(*q.shape[:2], *value.shape[2:], **single)
    tops, totals = (torch.empty(*s.grid[::-1], asked.blocks * block, **single) for _ in range(2))
    certainty = torch.empty(q.shape[:3] if variance else (0,), **single)
    tile = tiles_ahead(s.compiled, dtype)
    given = (q, k, value, times, rank, *asked, *kept, numbers, read, tops, totals, certainty, *s.sizes)
    Launch(average, (triton.cdiv(tokens, tile["M"]), *s.grid), given, s.compiled | tile).run()
    whole = read.unflatten(2, (-1, strips)).flatten(3)[..., : v.shape[3]]
    mean = turned(whole, times, frequency_of_values, True, v.dtype)
    return mean, certainty, *copies, read, q, k, value, tops, totals, *asked, *kept
