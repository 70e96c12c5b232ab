"""Device functions of the Triton kernels of `diagonal`: loads of cells and tokens, and the filter step of a token."""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._shared.triton.ptx import reciprocal

UNSPECIALIZED = ["length", "size", "tiles"]  # integer arguments whose values must not cause a new compilation
STRIDES = [f"{tensor}_{axis}" for tensor in ("mean", "var") for axis in "ngkv"]


@triton.jit
def cell_offsets(head, channel, V, P: tl.constexpr):
    return (head * V + channel)[:, None] * P + tl.arange(0, P)[None, :]


@triton.jit
def load_belief(base, n, head, channel, slot, n_stride, g_stride, k_stride, v_stride, real):
    """Load the mean or variance `[channels, slots]` of one sequence and head from `[N, G, K, V]` of any strides."""
    at = n * n_stride + head * g_stride + slot[None, :] * k_stride + channel[:, None] * v_stride
    return tl.load(base + at, mask=real, other=0.0)


@triton.jit
def load_dynamics(log_decay, noise, head, channel, V, K: tl.constexpr, P: tl.constexpr):
    """Load decay and process noise `[channels, slots]` from contiguous `[G, K, V]`; 1 and 0 outside."""
    slot = tl.arange(0, P)
    inside = (channel < V)[:, None] & (slot < K)[None, :]
    at = head * K * V + slot[None, :] * V + channel[:, None]
    decay = tl.exp(tl.load(log_decay + at, mask=inside, other=0.0).to(tl.float32))
    return decay, tl.load(noise + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def token_row(start, i: tl.constexpr, end, base, stride: tl.constexpr, PREFETCH: tl.constexpr, RAGGED: tl.constexpr):
    """Return the address of token `start + i` of a group of `PREFETCH`, or of one before `end`."""
    if RAGGED:
        row = base + tl.minimum(start + i, end - 1) * stride
    else:  # groups are whole, so one addition serves a group
        row = base + tl.minimum(start, end - PREFETCH) * stride + i * stride
    return row


@triton.jit
def load_keys(
    start, end, base, stride: tl.constexpr, slot, channel, K: tl.constexpr, P: tl.constexpr, PREFETCH: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Load keys or queries `[1, slots]` of the tokens from `start` to `start + PREFETCH`; beyond `end` others repeat.

    The threads of every channel load them, so that threads exchange nothing.
    """
    # With contiguous slots, a thread would take 8 slots of half precision; 4 need fewer exchanges in sums.
    groups_of_4 = slot // 4 * 4 + slot % 4
    spread = groups_of_4[None, :] + tl.zeros_like(channel)[:, None]
    loaded = ()
    for i in tl.static_range(PREFETCH):
        row = token_row(start, i, end, base, stride, PREFETCH, RAGGED)
        if K == P:
            loaded += (tl.load(row + spread),)
        else:
            loaded += (tl.load(row + spread, mask=spread < K, other=0.0),)
    return loaded


@triton.jit
def load_values(
    start, end, base, stride: tl.constexpr, channel, V, EVEN: tl.constexpr, PREFETCH: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Load values, precisions or output gradients `[channels, 1]` of these tokens; 0 beyond the last channel."""
    loaded = ()
    for i in tl.static_range(PREFETCH):
        row = token_row(start, i, end, base, stride, PREFETCH, RAGGED)
        if EVEN:
            loaded += (tl.load(row + channel)[:, None],)
        else:
            loaded += (tl.load(row + channel, mask=channel < V, other=0.0)[:, None],)
    return loaded


@triton.jit
def filter_step(mean, var, key, precision, value, decay, noise, PTX: tl.constexpr):
    """Predict and update by one token (equations 16 and 20 of Kalman Linear Attention, in moments).

    Returns the posterior mean and variance, the ratio of posterior to predicted variance, and the weighted innovation,
    which times the posterior variance is the correction of the mean.
    """
    predicted = decay * decay * var + noise
    weighted_key = key * precision
    shrinkage = reciprocal(1.0 + key * weighted_key * predicted, PTX)
    var = predicted * shrinkage
    predicted_mean = decay * mean
    innovation = weighted_key * (value - key * predicted_mean)
    return predicted_mean + var * innovation, var, shrinkage, innovation
