"""Decays per head between the tokens of a tile.

Every decay is the exponential of a log-decay between two tokens, which is never positive. Log-decays are summed in
float64 and clamped to `MIN_LOG_DECAY`. Otherwise a weak decay after a token with a very strong one would be the small
difference of two large numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.tiles import UNSPECIALIZED, load_per_token, locate_tile

MIN_LOG_DECAY = tl.constexpr(-1e3)  # exp(-104) already rounds to 0 in float32


@triton.jit
def log_decay_from_start(log_decay, token, count, head, G, SIZE: tl.constexpr):
    """Return the log-decay from the start of a tile through each token, float64 `[SIZE]`, and over the whole tile."""
    each = tl.maximum(load_per_token(log_decay + token * G + head, count, G, SIZE), MIN_LOG_DECAY).to(tl.float64)
    return tl.cumsum(each, 0), tl.sum(each, 0)


@triton.jit
def pairwise_decay(since, SIZE: tl.constexpr):
    """Return the decay from token s to token t as `[t, s]`, 0 for t < s, given `log_decay_from_start`."""
    t = tl.arange(0, SIZE)
    lag = (since[:, None] - since[None, :]).to(tl.float32)
    return tl.exp(tl.where(t[:, None] >= t[None, :], lag, float("-inf")))


@triton.jit
def pairwise_decay_transposed(since, SIZE: tl.constexpr):
    """Return the decay from token s to token t as `[s, t]`, 0 for t < s, given `log_decay_from_start`."""
    t = tl.arange(0, SIZE)
    lag = (since[None, :] - since[:, None]).to(tl.float32)
    return tl.exp(tl.where(t[:, None] <= t[None, :], lag, float("-inf")))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def head_decays(
    log_decay, gain, from_start, to_end, total, table, length, tiles, G,
    SIZE: tl.constexpr, PACKED: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """Store the decays from the start of a tile through each token, from each token to the end of the tile (times the
    gain if GAINS), and over the whole tile."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = locate_tile(table, index, length, tiles, SIZE, PACKED)
    since, all_tokens = log_decay_from_start(log_decay, token, count, head, G, SIZE)
    t = tl.arange(0, SIZE)
    at = token * G + head + t * G
    tl.store(from_start + at, tl.exp(since.to(tl.float32)), mask=t < count)
    rest = tl.exp((all_tokens - since).to(tl.float32))
    if GAINS:
        rest *= load_per_token(gain + token * G + head, count, G, SIZE)
    tl.store(to_end + at, rest, mask=t < count)
    tl.store(total + index * G + head, tl.exp(all_tokens.to(tl.float32)))
