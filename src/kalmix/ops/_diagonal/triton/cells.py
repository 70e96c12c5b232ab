"""What the Triton kernels of `diagonal` are made of: loads of cells and of tokens, and one token's step."""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.ptx import reciprocal

UNSPECIALIZED = ["length", "size", "tiles"]  # numbers that must not compile a kernel anew
STRIDES = [f"{tensor}_{axis}" for tensor in ("mean", "var") for axis in "ngkv"]


@triton.jit
def cell_offsets(head, channel, V, P: tl.constexpr):
    return (head * V + channel)[:, None] * P + tl.arange(0, P)[None, :]


@triton.jit
def belief_of(base, n, head, channel, slot, n_stride, g_stride, k_stride, v_stride, real):
    """Half a belief `[channels, slots]` from `[N, G, K, V]` of any strides."""
    at = n * n_stride + head * g_stride + slot[None, :] * k_stride + channel[:, None] * v_stride
    return tl.load(base + at, mask=real, other=0.0)


@triton.jit
def dynamics_of(log_decay, noise, head, channel, V, K: tl.constexpr, P: tl.constexpr):
    """Decay and process noise `[channels, slots]` from contiguous `[G, K, V]`; cells outside it hold still."""
    slot = tl.arange(0, P)
    inside = (channel < V)[:, None] & (slot < K)[None, :]
    at = head * K * V + slot[None, :] * V + channel[:, None]
    decay = tl.exp(tl.load(log_decay + at, mask=inside, other=0.0).to(tl.float32))
    return decay, tl.load(noise + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def keys_at(start, end, base, stride, slot, channel, K: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr):
    """Keys or queries `[1, slots]` of the tokens [start, start + WINDOW); past the end, the last again.

    Every channel's threads load them, so that nothing is exchanged.
    """
    spread = tl.max_contiguous(slot[None, :] + tl.zeros_like(channel)[:, None], [1, 4])
    loaded = ()
    for i in tl.static_range(WINDOW):
        row = base + tl.minimum(start + i, end - 1) * stride
        if K == P:
            loaded += (tl.load(row + spread),)
        else:
            loaded += (tl.load(row + spread, mask=spread < K, other=0.0),)
    return loaded


@triton.jit
def values_at(start, end, base, stride, channel, V, EVEN: tl.constexpr, WINDOW: tl.constexpr):
    """Values, precisions or output gradients `[channels, 1]` of as many tokens; 0 past the last channel."""
    loaded = ()
    for i in tl.static_range(WINDOW):
        row = base + tl.minimum(start + i, end - 1) * stride
        if EVEN:
            loaded += (tl.load(row + channel)[:, None],)
        else:
            loaded += (tl.load(row + channel, mask=channel < V, other=0.0)[:, None],)
    return loaded


@triton.jit
def step(mean, var, key, precision, value, decay, noise, PTX: tl.constexpr):
    """One token (equations 16 and 20 as moments).

    Returns posterior mean and variance, the ratio of posterior to predicted variance, and the surprise: what the
    posterior variance turns into a correction of the mean.
    """
    predicted = decay * decay * var + noise
    write = key * precision
    shrink = reciprocal(1.0 + key * write * predicted, PTX)
    var = predicted * shrink
    carried = decay * mean
    surprise = write * (value - key * carried)
    return carried + var * surprise, var, shrink, surprise
