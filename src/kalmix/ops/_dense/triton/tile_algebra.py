"""Decays, masks and inverses of a tile with scalar decays: device functions of `scalar_decay`."""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._dense.triton.primitives import split_matmul
from kalmix.ops._shared.triton.decay_products import log_decay_from_start, pairwise_decay_transposed
from kalmix.ops._shared.triton.tiles import num_levels


@triton.jit
def cumulative_log_decay(log_decay, token, count, head, G, SIZE: tl.constexpr, DECAY: tl.constexpr):
    """Return the log-decay from the entry of a tile to after each token, and over the whole tile, in float64."""
    if DECAY:
        cumulative, total = log_decay_from_start(log_decay, token, count, head, G, SIZE)
    else:
        cumulative = tl.zeros([SIZE], tl.float64)
        total = tl.sum(cumulative, 0)
    return cumulative, total


@triton.jit
def exp_float32(logs):
    """Return the exponential in float32."""
    return tl.exp(logs.to(tl.float32))


@triton.jit
def diagonal_mask(SIZE: tl.constexpr):
    """Return the mask `[t, s]` of t = s."""
    t = tl.arange(0, SIZE)
    return t[:, None] == t[None, :]


@triton.jit
def earlier_mask(SIZE: tl.constexpr):
    """Return the mask `[t, s]` of s < t."""
    t = tl.arange(0, SIZE)
    return t[:, None] > t[None, :]


@triton.jit
def diagonal(M, SIZE: tl.constexpr):
    """Return the diagonal of a square matrix."""
    return tl.sum(tl.where(diagonal_mask(SIZE), M, 0.0), 1)


@triton.jit
def accumulated_noise(decays, noise):
    """Return the process noise from the entry of a tile to after each token."""
    return tl.sum(decays * decays * noise[None, :], 1)


@triton.jit
def shared_noise(log_entry_decay, decays, accumulated, SIZE: tl.constexpr):
    """Return the process noise common to tokens t and s, decayed to the later of them, `[t, s]`."""
    t = tl.arange(0, SIZE)
    upper = pairwise_decay_transposed(log_entry_decay, SIZE) * accumulated[:, None]
    return tl.where(t[:, None] < t[None, :], upper, decays * accumulated[None, :])


@triton.jit
def one_minus_inverse(S, SIZE: tl.constexpr, TERMS: tl.constexpr):
    """Return I - (I + S)^-1 for the part of S below the diagonal, by block inversion with doubling block sizes."""
    t, s = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    level_bits = tl.where(t > s, t ^ s, 0)  # its highest bit is half the size of the block that separates t and s
    inverse = tl.where(t == s, 1.0, tl.where(level_bits == 1, -S, 0.0))
    for level in tl.static_range(1, num_levels(SIZE)):
        off_diagonal = tl.where(level_bits >> level == 1, S, 0.0)
        inverse -= split_matmul(split_matmul(inverse, off_diagonal, TERMS), inverse, TERMS)
    return tl.where(t > s, -inverse, 0.0)
