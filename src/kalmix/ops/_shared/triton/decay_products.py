"""Decays inside a tile, one a head: always relative, so never the exponential of a positive number.

Sums of logarithms are taken in float64, and no logarithm is less than `FORGOTTEN`: what decays a little after a token
that forgets everything would else be the small difference of two large numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.tiles import LOOSE, load_per_token, tile_of

FORGOTTEN = tl.constexpr(-1e3)  # a log-decay that leaves nothing: a tenth of it is the end of float32


@triton.jit
def elapsed(log_decay, token, count, head, G, SIZE: tl.constexpr):
    """Log-decay from the start of the tile to after each token, float64 `[SIZE]`, and over the whole tile."""
    each = tl.maximum(load_per_token(log_decay + token * G + head, count, G, SIZE), FORGOTTEN).to(tl.float64)
    return tl.cumsum(each, 0), tl.sum(each, 0)


@triton.jit
def between(since, SIZE: tl.constexpr):
    """Decay from token s to token t, `[t, s]`; 0 where t < s."""
    t = tl.arange(0, SIZE)
    lag = (since[:, None] - since[None, :]).to(tl.float32)
    return tl.exp(tl.where(t[:, None] >= t[None, :], lag, float("-inf")))


@triton.jit
def between_transposed(since, SIZE: tl.constexpr):
    """Decay from token s to token t, `[s, t]`; 0 where t < s."""
    t = tl.arange(0, SIZE)
    lag = (since[None, :] - since[:, None]).to(tl.float32)
    return tl.exp(tl.where(t[:, None] <= t[None, :], lag, float("-inf")))


@triton.jit(do_not_specialize=LOOSE)
def pace(
    log_decay, gain, entering, leaving, across, table, length, tiles, G,
    SIZE: tl.constexpr, PACKED: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """Decay from a tile's entry to each token, from each token to its exit (times the gain), and across the tile."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, count = tile_of(table, index, length, tiles, SIZE, PACKED)
    since, total = elapsed(log_decay, token, count, head, G, SIZE)
    t = tl.arange(0, SIZE)
    at = token * G + head + t * G
    tl.store(entering + at, tl.exp(since.to(tl.float32)), mask=t < count)
    rest = tl.exp((total - since).to(tl.float32))
    if GAINS:
        rest *= load_per_token(gain + token * G + head, count, G, SIZE)
    tl.store(leaving + at, rest, mask=t < count)
    tl.store(across + index * G + head, tl.exp(total.to(tl.float32)))
