"""Blocks of queries and of keys, in Triton: where they meet, who sees whom, and over which lags.

A block of keys is met at the time of its last token, a block of queries at that of its first: between tokens that see
each other, in different blocks, lie both. `survey` notes of every token its size and its lag to there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._attend import kv_layout as lanes
from kalmix.ops._attend.block_sizes import num_token_features
from kalmix.ops._attend.triton.scores import TINY, after, between, load_model, through, variances
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import hardware

NOWHERE = tl.constexpr(lanes.EMPTY_RANK)
OUTSIDE = tl.constexpr(2 * lanes.EMPTY_RANK)  # the rank of what is no slot: nothing sees it
BLOCKS = tl.constexpr(128)  # looked through at once
LOOSE = ["tokens", "slots", "asked_blocks", "kept_blocks", "window", "H", "G"]  # numbers that must not compile anew


class Survey(NamedTuple):
    """What is known of queries, or keys, in blocks.

    Attributes:
        traits: float32 `[L, H, rows, tokens]`, padded to whole blocks: size, a lag as `after` has it, and the variance
            that is known of a token alone: of a key after its lag, of what a query is compared with before it; where
            values have dynamics of their own, the last four of theirs, too.
        met: float64 `[L, blocks]`, the time a block is met at.
        ranks: int64 `[L, blocks, 2]`, the least and the greatest rank in a block.
    """

    traits: Tensor
    met: Tensor
    ranks: Tensor

    @property
    def blocks(self) -> int:
        return self.met.shape[1]

    @property
    def sizes(self) -> Tensor:
        """Of tokens, `[L, H, tokens]`."""
        return self.traits[:, :, 0]


rows_of = triton.constexpr_function(num_token_features)


@triton.jit
def note(traits, room, lag, noise, last, PTX: tl.constexpr):
    """What follows the lag among the traits of tokens."""
    rate, process, key, query = noise
    _lag, decay, grown, slope = after(rate, lag, PTX)
    tl.store(traits, decay)
    tl.store(traits + room, grown)
    tl.store(traits + 2 * room, slope)
    tl.store(traits + 3 * room, process * grown + tl.where(last, key * decay * decay, tl.maximum(query, TINY)))


@triton.jit
def clock(times, inside):
    """Load times, 0 where they are not finite: lags stay finite, also those of pairs that are hidden."""
    time = tl.load(times, mask=inside, other=0.0)
    return tl.where(time - time == 0.0, time, 0.0)


@triton.jit(do_not_specialize=["tokens", "slots", "first", "blocks", "H", "of_keys"])
def survey(
    times, rank, numbers, traits, met, ranks, tokens, slots, first, blocks, H, of_keys,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A block of one lane and head, of keys, met at its last token, or of queries, met at its first."""
    block, head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, t, last = block * BLOCK, tl.arange(0, BLOCK), of_keys > 0
    count = tokens - start
    at = lane * slots + first + start + t
    time = clock(times + at, t < count)
    own = tl.load(rank + at, mask=t < count, other=OUTSIDE)
    held = own > NOWHERE
    chosen = tl.where(last, tl.max(tl.where(held, t, -1), 0), tl.min(tl.where(held, t, BLOCK), 0))
    meeting = tl.sum(tl.where(t == chosen, time, 0.0), 0)
    lag = between(meeting, time)
    lag = tl.where(held, tl.maximum(tl.where(last, lag, -lag), 0.0), 0.0)
    room = blocks * BLOCK
    traits += (lane * H + head) * rows_of(SHARED) * room + start + t
    tl.store(traits, 0.0, mask=t >= count)  # where there are tokens, what turns them notes it
    tl.store(traits + room, lag)
    model = load_model(numbers, head, H)
    note(traits + 2 * room, room, lag, model[0], last, PTX)
    if not SHARED:
        note(traits + 6 * room, room, lag, model[1], last, PTX)
    if head == 0:
        tl.store(met + lane * blocks + block, meeting)
        ranks += (lane * blocks + block) * 2
        # No query sees all of a block of keys that is not full; of queries those that are not there do not matter.
        tl.store(ranks, tl.min(tl.where((t < count) | last, own, -OUTSIDE), 0))
        tl.store(ranks + 1, tl.max(own, 0))


def surveyed(
    x: Tensor, times: Tensor, rank: Tensor, numbers: Tensor, block: int, of_keys: bool, shared: bool
) -> Survey:
    """Of x `[L, tokens, H, K]`, whose tokens are the last of `times` and `rank`, `[L, S]`; sizes are left out."""
    count, tokens, heads = x.shape[:3]
    blocks, slots, rows = triton.cdiv(tokens, block), times.shape[1], num_token_features(shared)
    found = Survey(
        torch.empty(count, heads, rows, blocks * block, dtype=torch.float32, device=x.device),
        torch.empty(count, blocks, dtype=torch.float64, device=x.device),
        torch.empty(count, blocks, 2, dtype=torch.int64, device=x.device),
    )
    given = (times, rank, numbers, *found, tokens, slots, slots - tokens, blocks, heads, int(of_keys))
    compiled = {"BLOCK": block, "SHARED": shared, "PTX": hardware(), "num_warps": 4}
    Launch(survey, (blocks, heads, count), given, compiled).run()
    return found


@triton.jit
def seen_from(high, low, high_0, low_0, window, CAUSAL: tl.constexpr):
    """Whether some query with a rank from `low` to `high` may see some key with one from `low_0` to `high_0`."""
    return (high - low_0 > (-1 if CAUSAL else -window)) & (low - high_0 < window)


@triton.jit
def all_seen(high, low, high_0, low_0, window, CAUSAL: tl.constexpr):
    """Whether all such queries see all such keys."""
    return (low - high_0 > (-1 if CAUSAL else -window)) & (high - low_0 < window)


@triton.jit
def block_ranks(ranks, block):
    return tl.load(ranks + 2 * block + 1), tl.load(ranks + 2 * block)


@triton.jit
def blocks_in_sight(ranks, high, low, blocks, window, ASKS: tl.constexpr, CAUSAL: tl.constexpr):
    """From which to before which block something may be seen; `ASKS` if those blocks are of queries."""
    first, stop = blocks, 0
    for part in range(0, blocks, BLOCKS):
        block = part + tl.arange(0, BLOCKS)
        inside = block < blocks
        low_0 = tl.load(ranks + 2 * block, mask=inside, other=0)
        high_0 = tl.load(ranks + 2 * block + 1, mask=inside, other=0)
        if ASKS:
            seen = inside & seen_from(high_0, low_0, high, low, window, CAUSAL)
        else:
            seen = inside & seen_from(high, low, high_0, low_0, window, CAUSAL)
        first = tl.minimum(first, tl.min(tl.where(seen, block, blocks), 0))
        stop = tl.maximum(stop, tl.max(tl.where(seen, block + 1, 0), 0))
    return first, stop


@triton.jit
def load_lags(traits, at, room, FIRST: tl.constexpr, AXIS: tl.constexpr):
    return (
        tl.expand_dims(tl.load(traits + room + at), AXIS),
        tl.expand_dims(tl.load(traits + FIRST * room + at), AXIS),
        tl.expand_dims(tl.load(traits + (FIRST + 1) * room + at), AXIS),
        tl.expand_dims(tl.load(traits + (FIRST + 2) * room + at), AXIS),
        tl.expand_dims(tl.load(traits + (FIRST + 3) * room + at), AXIS),
    )


@triton.jit
def tokens_of(traits, times, rank, at, first, room, slots, AXIS: tl.constexpr, SHARED: tl.constexpr):
    """Size, lag and variance, these as values have them, time, rank and slot of the tokens at `at`; the first token has
    slot `first`."""
    near = load_lags(traits, at, room, 2, AXIS)
    far = near
    if not SHARED:
        far = load_lags(traits, at, room, 6, AXIS)
    slot = first + at
    time = clock(times + slot, slot < slots)
    own = tl.load(rank + slot, mask=slot < slots, other=OUTSIDE)
    size = tl.expand_dims(tl.load(traits + at), AXIS)
    return size, near, far, tl.expand_dims(time, AXIS), tl.expand_dims(own, AXIS), tl.expand_dims(slot, AXIS)


@triton.jit
def way_between(start, end, model, SHARED: tl.constexpr, PTX: tl.constexpr):
    """The lag from the end of a block of keys to the start of one of queries, as keys have it and as values."""
    apart = tl.maximum(between(tl.load(start), tl.load(end)), 0.0)
    near = after(model[0][0], apart, PTX)
    far = near
    if not SHARED:
        far = after(model[1][0], apart, PTX)
    return near, far


@triton.jit
def meet(
    query, key, way, model, DIRECT: tl.constexpr, QUERIES_FIRST: tl.constexpr, CAUSAL: tl.constexpr,
    SHARED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What lies between the tokens of a tile's pairs, for keys and for values: (decay, variances) and a lag, of the
    pairs or as `through` has it; and which pairs are ahead.

    Directly, or through where their blocks are met, between which lies `way`.
    """
    of_keys, of_values, _per_nu, _cooling, _floor = model
    if DIRECT:
        apart = between(query[3], key[3])
        ahead, away = apart < 0, tl.maximum(apart, 0.0) if CAUSAL else tl.abs(apart)
        lag = after(of_keys[0], away, PTX)
        certain, whole = variances(lag, of_keys, ahead, CAUSAL)
        near = lag[1], certain, whole
        far, lag_0 = near, lag
        if not SHARED:
            lag_0 = after(of_values[0], away, PTX)
            certain, whole = variances(lag_0, of_values, ahead, CAUSAL)
            far = lag_0[1], certain, whole
    else:
        ahead = False
        near, lag = through(query[1], way[0], key[1], of_keys, QUERIES_FIRST)
        far, lag_0 = near, lag
        if not SHARED:
            far, lag_0 = through(query[2], way[1], key[2], of_values, QUERIES_FIRST)
    return near, far, lag, lag_0, ahead


@triton.jit
def hidden(
    score, unseen, query, key, whole, slots, window,
    DIRECT: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scores, or `unseen` where the key is not seen; `whole` says that all are."""
    if MASKED:
        if not whole:
            behind = query[4] - key[4]
            score = tl.where((behind > (-1 if CAUSAL else -window)) & (behind < window), score, unseen)
    elif DIRECT:
        seen = key[5] < slots
        if CAUSAL:
            seen = seen & (query[5] >= key[5])
        score = tl.where(seen, score, unseen)
    return score
