"""Form of `diagonal` as two convolutions, for time-invariant signals without process noise."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.errors import ArgumentError
from kalmix.ops._shared.validation import check_signal, check_tokens
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import can_check_values, check_dtype_and_device, check_range, check_shape


def diagonal_fft(q: Tensor, k: Tensor, v: Tensor, *, precision: Tensor, log_decay: Tensor) -> Filtered:
    r"""Compute `kalmix.ops.diagonal` by two convolutions (Theorem 3 of *Kalman Linear Attention*).

    The filter must be time-invariant: no process noise, one key for all tokens, and no prior information. For key
    entry k and a column of the value, the information lambda and the information-weighted sum eta are, with
    a = exp(log_decay),

        lambda_t = k^2 sum_s a^{-2 (t - s)} precision_s
        eta_t    = k sum_s a^{-(t - s)} precision_s v_s

    where s runs over token t and all tokens before it. Each pair of a key entry and a column is a cell of the memory;
    its mean is eta / lambda and its variance 1 / lambda.

    The factors a^{-2 (t - s)} grow with the distance. A Fourier transform has an error relative to its largest result,
    that of the last token. So the results of the first tokens lose about -2 T log_decay / ln(10) decimal digits. Once
    all digits are lost, they may be NaN or infinite, and variances negative, without an error. Use this function for
    short sequences, slow decay and preferably float64; `kalmix.ops.diagonal` has no such limit.

    Args:
        q: `[B, T, H, K]`, queries, in float64, float32, bfloat16 or float16.
        k: `[H, K]`, key of all tokens, in the dtype of `q`.
        v: `[B, T, G, V]`, observed values, in the dtype of `q`. G must be a multiple of H; value head g uses key head
            g // (G / H).
        precision: `[B, T, G, V]`, inverse variance of the observations, >= 0, in the dtype of `v` or in float32
            (float64 if `v` is).
        log_decay: `[G, K, V]`, natural logarithm per token, <= 0, in a dtype that `precision` may have.

    Returns:
        `Filtered` with mean `[B, T, G, V]` in the dtype of `v`, variance `[B, T, G, V]`, and the `DiagonalBelief` after
        the last token, mean and variance `[B, G, K, V]`. Variances and the belief are in float32 (float64 if the inputs
        are). The variance is always returned. A cell without an observation so far, or with key entry 0, has mean 0 and
        infinite variance. A read-out has infinite variance if a query entry other than 0 reads a cell with infinite
        variance.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.
            Also if the decay is so fast that a^{-2T} overflows the dtype of the variance.

    Values, NaN and infinity included, are checked on CPUs, and on GPUs inside `kalmix.checks()`; never in compiled code
    or inside a transform of `torch.func`.

    Complexity: O(T log(T) K V) operations and O(T K V) memory.

    Example:
        >>> from kalmix.ops.experimental import diagonal_fft
        >>> q, v = torch.randn(2, 16, 1, 4), torch.randn(2, 16, 1, 8)
        >>> mean, variance, belief = diagonal_fft(
        ...     q, torch.randn(1, 4), v, precision=torch.ones_like(v), log_decay=torch.full((1, 4, 8), -0.01))
        >>> mean.shape, belief.mean.shape
        (torch.Size([2, 16, 1, 8]), torch.Size([2, 1, 4, 8]))
    """
    sizes = check_tokens(q, q, v)
    check_signal("precision", precision, ("B T G V",), sizes, v, minimum=0.0)
    check_signal("log_decay", log_decay, ("G K V",), sizes, v, maximum=0.0)
    check_shape("k", k, "H K", sizes)
    check_dtype_and_device("k", k, (q.dtype,), q.device)
    check_range("k", k)
    length, group, dtype = sizes["T"], sizes["G"] // sizes["H"], belief_dtype(q.dtype)
    limit = log(torch.finfo(dtype).max) / (2 * max(length, 1))
    if can_check_values(log_decay) and log_decay.numel() and float(log_decay.detach().min()) < -limit:
        raise ArgumentError(
            "log_decay",
            problem=f"has a minimum of {float(log_decay.detach().min()):g}",
            expected=f"values of at least {-limit:g}, so that the convolution kernel of {length} tokens fits {dtype}",
        )
    if min(sizes.values()) == 0:
        zeros = v.new_zeros(sizes["B"], *log_decay.shape, dtype=dtype)
        return Filtered(torch.zeros_like(v), torch.zeros_like(v, dtype=dtype), DiagonalBelief(zeros, zeros + torch.inf))

    key = k.to(dtype).repeat_interleave(group, 0)[..., None]  # [G, K, 1]
    query = q.to(dtype).repeat_interleave(group, 2)[..., None]  # [B, T, G, K, 1]
    weight = precision.to(dtype)
    lag = torch.arange(length, device=q.device, dtype=dtype)[:, None, None, None]
    growth = -log_decay.to(dtype) * lag  # [T, G, K, V]
    information = _convolve(key**2 * torch.exp(2 * growth), weight[..., None, :])
    evidence = _convolve(key * torch.exp(growth), (weight * v.to(dtype))[..., None, :])

    # Exact mask of observed cells; the transform returns rounding errors where the sum is 0.
    observed = (weight > 0).cummax(1).values[..., None, :] & (key != 0)
    information = torch.where(observed, information, 1.0)
    mean = torch.where(observed, evidence / information, 0.0)
    variance = torch.where(observed, 1 / information, torch.inf)
    readout = (query * mean).sum(-2).to(v.dtype)
    readout_variance = torch.where(query != 0, query**2 * variance, 0.0).sum(-2)  # 0 times infinity is 0 here
    return Filtered(readout, readout_variance, DiagonalBelief(mean[:, -1], variance[:, -1]))


def _convolve(kernel: Tensor, signal: Tensor) -> Tensor:
    """Compute the causal convolution of `kernel` (time in dim 0) and `signal` (time in dim 1), without wrap-around."""
    length = kernel.shape[0]
    product = torch.fft.rfft(kernel, n=2 * length, dim=0) * torch.fft.rfft(signal, n=2 * length, dim=1)
    return torch.fft.irfft(product, n=2 * length, dim=1)[:, :length]
