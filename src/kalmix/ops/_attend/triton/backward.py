"""`attend` in Triton, backward: scores are computed again, tile by tile, and nothing is kept of a pair.

Two launches: `to_queries`, a tile of queries through all keys, as forwards, and `to_keys`, a tile of keys through all
queries, tiles lying the other way. Both also add up gradients of the numbers of their head, one sum a program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from kalmix.ops._attend.scores import ScoreConfig
from kalmix.ops._attend.triton.block_masks import (
    LOOSE,
    all_seen,
    block_ranks,
    blocks_in_sight,
    hidden,
    meet,
    rows_of,
    tokens_of,
    way_between,
)
from kalmix.ops._attend.triton.forward import LEAST, SMALL, reach, shape_of
from kalmix.ops._attend.triton.parameters import (
    PARTS,
    by_noise,
    in_a_column,
    of_holding,
    of_pairs,
    of_ways,
    partly,
    total,
)
from kalmix.ops._attend.triton.rotary import parts_for, summed, turned_back
from kalmix.ops._attend.triton.scores import LN2, LOG2E, load_model, precisions, pull_back, scored
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import rounded
from kalmix.ops._shared.triton.tiles import load_rows, product, store_rows

NUMBERS = tl.constexpr(11)


@triton.jit
def derive(
    gram, to_reached, value, query, key, way, model, tops, shares, to_sure, whole, slots, window,
    DIRECT: tl.constexpr, QUERIES_FIRST: tl.constexpr, SHARED: tl.constexpr, RATIONAL: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A tile's weights of values; gradients as `pull_back` has them, of log temperature and of values' log decay; and
    what lies between its pairs, as `meet` has it.

    Gradients of scores add up to nothing for every query: so any number may be taken from what temperature multiplies,
    and the top keeps it small. Weights are not divided by their sum: `to_reached` and `shares` are.
    """
    near, far, lag, lag_0, ahead = meet(query, key, way, model, DIRECT, QUERIES_FIRST, CAUSAL, SHARED, PTX)
    query_size, key_size = tl.where(query[0] == query[0], query[0], 0.0), tl.where(key[0] == key[0], key[0], 0.0)
    found = scored(gram, query_size, key_size, near, far, ahead, lag_0[0], model, SHARED, RATIONAL, CAUSAL, PTX)
    share = model[3] * found[0] - tops
    score = hidden(share, float("-inf"), query, key, whole, slots, window, DIRECT, MASKED, CAUSAL)
    weight = tl.exp2(score)
    reached = reach(weight, score, far, lag_0, ahead, model, CAUSAL)
    reached = rounded(reached, value, PTX)  # as they were averaged with: so gradients of scores add up to nothing
    to_reach = reached * to_reached
    to_score = to_reach - weight * shares
    part = 0.0
    if VARIANCE:
        added = precisions(found, near, far, ahead, model, RATIONAL, CAUSAL, PTX)
        part = tl.where(score > float("-inf"), added * to_sure, 0.0)
    back = pull_back(
        to_score, part, gram, query_size, key_size, near, far, ahead, model, found,
        SHARED, RATIONAL, CAUSAL, VARIANCE, PTX,
    )  # fmt: skip
    return reached, back, found[1], to_score * share, to_reach, near, lag, lag_0, ahead


@triton.jit
def pull_queries(
    to_q, own, sums, query, to_read, asking, tops, shares, to_sure, k, v, times, rank, kept, way, kept_ranks,
    first, high, low, slots, kept_blocks, window, H, G, model,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, of their sizes, and of numbers, with the keys from `first` on added."""
    first = tl.multiple_of(first, N)
    token = tl.cast(first, tl.int64)
    count = slots - first if DIRECT else N
    key = load_rows(k + token * H * K, H * K, count, tl.arange(0, P), K, N)
    value = load_rows(v + token * G * V, G * V, count, tl.arange(0, W), V, N)
    gram, to_reached = product(query, tl.trans(key), PRECISION), product(to_read, tl.trans(value), PRECISION)
    block, whole = first // BLOCK, False
    held = tokens_of(kept, times, rank, first + tl.arange(0, N), 0, kept_blocks * BLOCK, slots, 0, SHARED)
    if MASKED:
        high_0, low_0 = block_ranks(kept_ranks, block)
        whole = all_seen(high, low, high_0, low_0, window, CAUSAL)
    _reached, back, residual, to_temperature, to_reach, near, lag, lag_0, ahead = derive(
        gram, to_reached, value, asking, held, way, model, tops, shares, to_sure, whole, slots, window,
        DIRECT, True, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE, PTX,
    )  # fmt: skip
    nu, temperature, noises = sums
    if DIRECT:
        noises = of_pairs(noises, back, to_reach, near, lag, lag_0, ahead, model, SHARED, CAUSAL)
    else:
        noises = of_ways(noises, back, to_reach, held, lag, lag_0, model, SHARED)
    sums = nu + partly(back[4] * residual), temperature + partly(to_temperature), noises
    to_q = product(back[0].to(key.dtype), key, PRECISION, to_q)
    return to_q, own + partly(back[1]), sums


@triton.jit(do_not_specialize=LOOSE)
def to_queries(
    q, k, v, times, rank, asked, starts, asked_ranks, kept, ends, kept_ranks, numbers, read, to_read, tops, shares,
    certainty, to_certainty, to_q, to_numbers,
    tokens, slots, asked_blocks, kept_blocks, window, H, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    VARIANCE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries and, through them, of numbers; notes <what is read, its gradient> (`shares`)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    value_head, lane = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, start, past = value_head // SHARE, tile * M, slots - tokens
    model = load_model(numbers, head, H)
    token = lane * tokens + start
    place = token * G + value_head
    q += (token * H + head) * K
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
    here = (lane * G + value_head) * room + at
    column = tl.arange(0, W)
    outcome = load_rows(read + place * V, G * V, tokens - start, column, V, M)
    share = tl.sum(outcome * load_rows(to_read + place * V, G * V, tokens - start, column, V, M).to(tl.float32), 1)
    top = tl.load(tops + here)
    known = top < -LEAST
    share = tl.where(known, share, 0.0)
    tl.store(shares + here, share)
    top, to_sure = top[:, None], tl.zeros([M], tl.float32)
    if VARIANCE:
        row, asked_here = (lane * tokens + at) * H + head, known & (value_head % SHARE == 0)
        sure = tl.load(certainty + row, mask=asked_here, other=0.0)
        to_sure = tl.load(to_certainty + row, mask=asked_here, other=0.0) * tl.exp2(-LOG2E * sure)
    query = load_rows(q, H * K, tokens - start, tl.arange(0, P), K, M)
    arrived = load_rows(to_read + place * V, G * V, tokens - start, column, V, M)
    asking = tokens_of(asked, times, rank, at, past, room, slots, 1, SHARED)
    found, none = tl.zeros([M, P], tl.float32), tl.zeros([M, PARTS], tl.float32)
    own, sums = none, (none, none, (none, none, none, none, none, none, none, none, none))
    begin, stop, near = 0, slots, 0
    if CAUSAL:
        stop, near = tl.minimum(past + start + M, slots), (past + block * BLOCK) // BLOCK * BLOCK
    high, low = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if MASKED:
        high, low = block_ranks(asked_ranks + lane * asked_blocks * 2, block)
        from_block, to_block = blocks_in_sight(kept_ranks, high, low, kept_blocks, window, False, CAUSAL)
        begin, stop = from_block * BLOCK, tl.minimum(stop, to_block * BLOCK)
    CLOSE: tl.constexpr = N // 2 if N > 16 else N
    if CAUSAL:
        for first in tl.range(begin, near, N, num_stages=STAGES):
            way = way_between(starts, ends + first // BLOCK, model, SHARED, PTX)
            found, own, sums = pull_queries(
                found, own, sums, query, arrived, asking, top, share[:, None], to_sure[:, None], k, v, times, rank,
                kept, way, kept_ranks, first, high, low, slots, kept_blocks, window, H, G, model,
                K, P, V, W, BLOCK, N, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE, False, PRECISION, PTX,
            )  # fmt: skip
    for first in tl.range(tl.maximum(begin, near), stop, CLOSE, num_stages=2):
        found, own, sums = pull_queries(
            found, own, sums, query, arrived, asking, top, share[:, None], to_sure[:, None], k, v, times, rank,
            kept, None, kept_ranks, first, high, low, slots, kept_blocks, window, H, G, model,
            K, P, V, W, BLOCK, CLOSE, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE, True, PRECISION, PTX,
        )  # fmt: skip
    again = load_rows(q, H * K, tokens - start, tl.arange(0, P), K, M).to(tl.float32)
    found = model[2] * (found + in_a_column(own) * again)
    store_rows(to_q + place * K, G * K, tokens - start, tl.arange(0, P), found, K, M)
    to_numbers += ((lane * tl.num_programs(0) + tile) * G + value_head) * NUMBERS
    nu, temperature, noises = sums
    for i in tl.static_range(8):
        tl.store(to_numbers + i, total(noises[i]))
    tl.store(to_numbers + 8, -0.5 * model[2] * model[2] * total(nu))
    tl.store(to_numbers + 9, -LN2 / model[3] * total(temperature))
    tl.store(to_numbers + 10, total(noises[8]))


@triton.jit
def pull_keys(
    to_k, to_v, own, sums, key, value, holding, q, to_read, tops, shares, certainty, to_certainty, times, rank, asked,
    way, asked_ranks, first, high, low, past, tokens, slots, asked_blocks, window, H, G, sure, model,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, VARIANCE: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, of keys' sizes, and of what is known of keys when their block ends, with
    the queries from `first` on added."""
    first = tl.multiple_of(first, M)
    token = tl.cast(first, tl.int64)
    query = load_rows(q + token * H * K, H * K, tokens - first, tl.arange(0, P), K, M)
    arrived = load_rows(to_read + token * G * V, G * V, tokens - first, tl.arange(0, W), V, M)
    gram, to_reached = product(key, tl.trans(query), PRECISION), product(value, tl.trans(arrived), PRECISION)
    block, whole, at = first // BLOCK, False, first + tl.arange(0, M)
    asking = tokens_of(asked, times, rank, at, past, asked_blocks * BLOCK, slots, 0, SHARED)
    top, share = tl.load(tops + at), tl.load(shares + at)[None, :]
    known, top = top < -LEAST, top[None, :]
    to_sure = top
    if VARIANCE:
        certain = tl.load(certainty + at * H, mask=known, other=0.0)
        given = tl.load(to_certainty + at * H, mask=known, other=0.0) * sure
        to_sure = (given * tl.exp2(-LOG2E * certain))[None, :]
    if MASKED:
        high_0, low_0 = block_ranks(asked_ranks, block)
        whole = all_seen(high_0, low_0, high, low, window, CAUSAL)
    reached, back, _residual, _temperature, _to_reach, _near, lag, lag_0, _ahead = derive(
        gram, to_reached, value, asking, holding, way, model, top, share, to_sure, whole, slots, window,
        DIRECT, False, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE, PTX,
    )  # fmt: skip
    if (
        first < 0
    ):  # never: but what a branch may change is waited for, and of two sums under way ptxas would await each part
        to_v, to_k = to_v * 0.0, to_k * 0.0
    to_v = product(reached.to(value.dtype), arrived, PRECISION, to_v)
    to_k = product(back[0].to(key.dtype), query, PRECISION, to_k)
    if not DIRECT:
        sums = of_holding(sums, back, asking, lag, lag_0, SHARED)
    return to_k, to_v, own + partly(back[2]), sums


@triton.jit(do_not_specialize=LOOSE)
def to_keys(
    q, k, v, times, rank, asked, starts, asked_ranks, kept, ends, kept_ranks, numbers, to_read, tops, shares,
    certainty, to_certainty, to_k, to_v, to_numbers,
    tokens, slots, asked_blocks, kept_blocks, window, H, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SHARED: tl.constexpr, RATIONAL: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    VARIANCE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, one lane and value head, and of numbers through what is known of keys
    when their block ends; the longest tiles first."""
    start, value_head, lane = tl.program_id(0) * N, tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, past, token = value_head // SHARE, slots - tokens, lane * slots + start
    model = load_model(numbers, head, H)
    q += (lane * tokens * H + head) * K
    to_read += (lane * tokens * G + value_head) * V
    k += (token * H + head) * K
    v += (token * G + value_head) * V
    times += lane * slots
    rank += lane * slots
    at, block, room = start + tl.arange(0, N), start // BLOCK, asked_blocks * BLOCK
    asked += (lane * H + head) * rows_of(SHARED) * room
    kept += (lane * H + head) * rows_of(SHARED) * kept_blocks * BLOCK
    starts += lane * asked_blocks
    ends += lane * kept_blocks + block
    asked_ranks += lane * asked_blocks * 2
    tops += (lane * G + value_head) * room
    shares += (lane * G + value_head) * room
    certainty += lane * tokens * H + head
    to_certainty += lane * tokens * H + head
    sure = tl.where(value_head % SHARE == 0, 1.0, 0.0)
    key = load_rows(k, H * K, slots - start, tl.arange(0, P), K, N)
    value = load_rows(v, G * V, slots - start, tl.arange(0, W), V, N)
    holding = tokens_of(kept, times, rank, at, 0, kept_blocks * BLOCK, slots, 1, SHARED)
    found, moved, own = tl.zeros([N, P], tl.float32), tl.zeros([N, W], tl.float32), tl.zeros([N, PARTS], tl.float32)
    begin, stop, far = 0, tokens, tokens
    if CAUSAL:
        begin = tl.maximum(start - past, 0) // M * M
        far = tl.maximum(tl.cdiv((block + 1) * BLOCK - past, BLOCK), 0) * BLOCK
    high, low = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if MASKED:
        high, low = block_ranks(kept_ranks + lane * kept_blocks * 2, block)
        from_block, to_block = blocks_in_sight(asked_ranks, high, low, asked_blocks, window, True, CAUSAL)
        begin, stop = tl.maximum(begin, from_block * BLOCK), tl.minimum(stop, to_block * BLOCK)
    CLOSE: tl.constexpr = M // 2 if M > 16 else M
    sums, to_log = (own, own, own), tl.zeros([N, 1], tl.float32)
    if CAUSAL:
        for first in tl.range(tl.maximum(begin, far), stop, M, num_stages=STAGES):
            way = way_between(starts + first // BLOCK, ends, model, SHARED, PTX)
            found, moved, own, sums = pull_keys(
                found, moved, own, sums, key, value, holding, q, to_read, tops, shares, certainty, to_certainty, times,
                rank, asked, way, asked_ranks, first, high, low, past, tokens, slots, asked_blocks, window,
                H, G, sure, model, K, P, V, W, BLOCK, M, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE,
                False, PRECISION, PTX,
            )  # fmt: skip
        to_log = tl.sum(moved * value.to(tl.float32), 1)[:, None]
    to_decay, to_unsure, to_unsure_0 = in_a_column(sums[0]), in_a_column(sums[1]), in_a_column(sums[2])
    held = tokens_of(kept, times, rank, at, 0, kept_blocks * BLOCK, slots, 1, SHARED)
    rate, process, noise = by_noise(held[1], model[0], to_unsure, model[2] * to_decay, to_log if SHARED else 0.0)
    rate_0, process_0, noise_0 = 0.0, 0.0, 0.0
    if not SHARED:
        rate_0, process_0, noise_0 = by_noise(held[2], model[1], to_unsure_0, 0.0, to_log)
    to_numbers += ((lane * tl.num_programs(0) + tl.program_id(0)) * G + value_head) * NUMBERS
    for i in tl.static_range(NUMBERS):
        tl.store(to_numbers + i, (rate, process, noise, 0.0, rate_0, process_0, noise_0, 0.0, 0.0, 0.0, 0.0)[i])
    for first in tl.range(begin, tl.minimum(far, stop), CLOSE, num_stages=2):
        found, moved, own, _sums = pull_keys(
            found, moved, own, (own, own, own), key, value, holding, q, to_read, tops, shares, certainty, to_certainty,
            times, rank, asked, None, asked_ranks, first, high, low, past, tokens, slots, asked_blocks, window,
            H, G, sure, model, K, P, V, W, BLOCK, CLOSE, SHARED, RATIONAL, CAUSAL, MASKED, VARIANCE,
            True, PRECISION, PTX,
        )  # fmt: skip
    again = load_rows(k, H * K, slots - start, tl.arange(0, P), K, N).to(tl.float32)
    found = model[2] * (found + in_a_column(own) * again)
    store_rows(to_k + (token * G + value_head) * K, G * K, slots - start, tl.arange(0, P), found, K, N)
    store_rows(to_v + (token * G + value_head) * V, G * V, slots - start, tl.arange(0, W), moved, V, N)


def tiles_of_queries(compiled: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """A tile of `to_queries`: see `triton.tiles_ahead`."""
    wide = max(compiled["P"], compiled["W"])
    if compiled["BLOCK"] == 16:
        return SMALL
    if dtype == torch.float32:
        return {"M": 128 if wide <= 64 else 64, "N": 32, "STAGES": 1, "num_warps": 8 if wide <= 64 else 4}
    simple = wide <= 128 and compiled["SHARED"] and not compiled["VARIANCE"]
    return {
        "M": 128 if wide <= 128 else 64, "N": 64 if simple else 32, "STAGES": 3 if simple else 2, "num_warps": 8,
    }  # fmt: skip


def tiles_of_keys(compiled: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """A tile of `to_keys`, few queries."""
    wide = max(compiled["P"], compiled["W"])
    if compiled["BLOCK"] == 16:
        return SMALL
    if dtype == torch.float32:
        return {"M": 32, "N": 128 if wide <= 64 else 64, "STAGES": 1, "num_warps": 8 if wide <= 64 else 4}
    return {"M": 32, "N": 128 if wide <= 128 else 64, "STAGES": 3 if wide <= 128 else 2, "num_warps": 8}


def backward(
    to_mean: Tensor, to_certainty: Tensor, kept: list[Tensor], frequency: Tensor, frequency_of_values: Tensor,
    times: Tensor, rank: Tensor, numbers: Tensor, rules: ScoreConfig, masked: bool, variance: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, in `dtype`, of both frequencies and of numbers."""
    certainty, read, q, k, v, tops, totals, *surveys = kept
    times, rank, numbers, to_certainty = (x.contiguous() for x in (times, rank, numbers, to_certainty))
    s = shape_of(q, k, v, rules, masked, variance)
    (count, tokens, heads, width), (_, slots, own, strip), values = q.shape, v.shape, to_mean.shape[3]
    strips = own // to_mean.shape[2]

    def whole(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, strips)).flatten(3)[..., :values]

    moves, moves_0 = parts_for(q, k), parts_for(to_mean, whole(v))
    to_read = turned_back(
        to_mean, whole(read), times, frequency_of_values, True, v.dtype, moves_0[0], totals[:, ::strips].contiguous()
    )
    to_read = pad(to_read, (0, strips * strip - values)) if strips * strip > values else to_read
    to_read = to_read.unflatten(3, (strips, strip)).flatten(2, 3)
    single = {"dtype": torch.float32, "device": q.device}
    of_queries, of_keys = tiles_of_queries(s.compiled, q.dtype), tiles_of_keys(s.compiled, q.dtype)
    tiles, tiles_0 = triton.cdiv(tokens, of_queries["M"]), triton.cdiv(slots, of_keys["N"])
    to_q = torch.empty(count, tokens, own, width, **single)
    to_k = torch.empty(count, slots, own, width, **single)
    to_v = torch.empty(v.shape, **single)
    to_numbers = torch.empty(count * (tiles + tiles_0), own, NUMBERS.value, **single)
    shares = torch.empty_like(tops)
    given = (q, k, v, times, rank, *surveys, numbers)
    sums = (tops, shares, certainty, to_certainty)
    Launch(to_queries, (tiles, *s.grid), (
        *given, read, to_read, *sums, to_q, to_numbers, *s.sizes,
    ), s.compiled | of_queries).run()  # fmt: skip
    Launch(to_keys, (tiles_0, *s.grid), (
        *given, to_read, *sums, to_k, to_v, to_numbers[count * tiles :], *s.sizes,
    ), s.compiled | of_keys).run()  # fmt: skip
    if own != heads:
        to_q, to_k = (x.unflatten(2, (heads, -1)).sum(3) for x in (to_q, to_k))
    to_q = turned_back(to_q, q, times, frequency, False, dtype, moves[0])
    to_k = turned_back(to_k, k, times, frequency, False, dtype, moves[1])
    to_v = turned_back(whole(to_v), whole(v), times, frequency_of_values, False, dtype, moves_0[1])
    to_numbers = to_numbers.sum(0).unflatten(0, (heads, -1)).sum(1).T
    return to_q, to_k, to_v, summed(moves[2], frequency), summed(moves_0[2], frequency_of_values), to_numbers
