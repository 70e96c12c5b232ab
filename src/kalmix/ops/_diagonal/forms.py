"""Two other forms of the op `diagonal`: convolutions, where it is one, and the matrix it multiplies values by."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.beliefs import DiagonalBelief
from kalmix.errors import ArgumentError
from kalmix.ops._diagonal.api import default_prior
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import check_kind, check_range, check_shape, check_values


class KalmanMatrix(NamedTuple):
    """The op `diagonal` as a matrix: `mean[b, :, g, d] = weights[b, g, d] @ v[b, :, g, d] + initial[b, :, g, d]`.

    Attributes:
        weights: `[B, G, V, T, T]`, lower triangular: what the read-out at one token (row) makes of an earlier value.
        initial: `[B, T, G, V]`, what it still makes of the prior's mean.
    """

    weights: Tensor
    initial: Tensor


def diagonal_fft(q: Tensor, k: Tensor, v: Tensor, *, precision: Tensor, log_decay: Tensor) -> Filtered:
    r"""The op `diagonal` by two convolutions (Theorem 3 of Kalman Linear Attention), where it is linear and
    time-invariant: no process noise, one key for all tokens, nothing known before the first.

        lambda_t = k^2 sum_s a^{-2 (t - s)} precision_s,   eta_t = k sum_s a^{-(t - s)} precision_s v_s

    The kernels grow as a^{-2t}, and a Fourier transform rounds relative to the largest term: the first tokens lose
    about `-2 T log_decay / log(10)` digits. It is for short T, slow decay and, better, float64; the op has no such
    limit.

    Args:
        q: `[B, T, H, K]` read-out.
        k: `[H, K]` the observation operator of every token; same dtype as `q`.
        v: `[B, T, G, V]` observed values; same dtype as `q`.
        precision: `[B, T, G, V]` inverse variance of the observation, >= 0.
        log_decay: `[G, K, V]` natural log per token, <= 0.

    Returns:
        `Filtered` as from `kalmix.ops.diagonal`, variance included. A cell nothing was observed of yet has mean 0
        and infinite variance, and so has every read-out of it.

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, or a decay so fast that a^{-2T} overflows.

    Complexity: O(T log(T) K V) work, O(T K V) memory.
    """
    sizes = check_tokens(q, q, v)
    check_signal("precision", precision, ("B T G V",), sizes, v, least=0.0)
    check_signal("log_decay", log_decay, ("G K V",), sizes, v, most=0.0)
    check_shape("k", k, "H K", sizes)
    check_kind("k", k, (q.dtype,), q.device)
    check_range("k", k)
    length, group, dtype = sizes["T"], sizes["G"] // sizes["H"], belief_dtype(q.dtype)
    limit = log(torch.finfo(dtype).max) / (2 * max(length, 1))
    if check_values(log_decay) and log_decay.numel() and float(log_decay.detach().min()) < -limit:
        raise ArgumentError(
            "log_decay",
            got=f"as low as {float(log_decay.detach().min()):g}",
            needs=f"at least {-limit:g} for the kernel of {length} tokens to fit {dtype}",
        )
    if min(sizes.values()) == 0:
        nothing = v.new_zeros(sizes["B"], *log_decay.shape, dtype=dtype)
        return Filtered(
            torch.zeros_like(v), torch.zeros_like(v, dtype=dtype), DiagonalBelief(nothing, nothing + torch.inf)
        )

    key = k.to(dtype).repeat_interleave(group, 0)[..., None]  # [G, K, 1]
    query = q.to(dtype).repeat_interleave(group, 2)[..., None]  # [B, T, G, K, 1]
    weight = precision.to(dtype)
    lag = torch.arange(length, device=q.device, dtype=dtype)[:, None, None, None]
    growth = -log_decay.to(dtype) * lag  # [T, G, K, V]
    information = _convolve(key**2 * torch.exp(2 * growth), weight[..., None, :])
    evidence = _convolve(key * torch.exp(growth), (weight * v.to(dtype))[..., None, :])

    # Whether anything was seen is exact; the transform would return its rounding.
    seen = (weight > 0).cummax(1).values[..., None, :] & (key != 0)
    information = torch.where(seen, information, 1.0)
    mean = torch.where(seen, evidence / information, 0.0)
    variance = torch.where(seen, 1 / information, torch.inf)
    read = (query * mean).sum(-2).to(v.dtype)
    spread = torch.where(query != 0, query**2 * variance, 0.0).sum(-2)  # 0 times infinity is 0 here
    return Filtered(read, spread, DiagonalBelief(mean[:, -1], variance[:, -1]))


def diagonal_matrix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    belief: DiagonalBelief | None = None,
) -> KalmanMatrix:
    r"""The lower-triangular matrix the op `diagonal` multiplies values by (appendix E.4), for pictures and tests.

    The mean of a cell is affine in the values: with r = 1 / (1 + k_n w s~) and c = s' w,

        mu_t = a r_t mu_{t-1} + c_t v_t,   weights[t, j] = sum_n q_{t,n} (prod_{i=j+1}^{t} a r_i) c_j.

    Nothing is divided by a small number, so fast decays and sure observations are safe.

    Args:
        q, k, v, precision, log_decay, process_noise, belief: as in `kalmix.ops.diagonal`; of `v` only shape, dtype
            and device count, for the weights do not depend on it.

    Returns:
        `KalmanMatrix`, in the dtype of the belief.

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as in `kalmix.ops.diagonal`.

    Complexity: O(T^2 K V) work; memory O(T^2 V + T K V), to differentiate O(T^2 K V).
    """
    sizes = check_tokens(q, k, v)
    check_signal("precision", precision, ("B T G V",), sizes, v, least=0.0)
    check_signal("log_decay", log_decay, ("G K V",), sizes, v, most=0.0)
    check_signal("process_noise", process_noise, ("G K V",), sizes, v, least=0.0)
    sizes["N"] = sizes["B"]
    mean, var = check_belief(belief, default_prior(v, sizes), ("N G K V", "N G K V"), sizes)
    length, group, dtype, cells = sizes["T"], sizes["G"] // sizes["H"], mean.dtype, mean.shape

    queries, keys = (x.to(dtype).repeat_interleave(group, 2)[..., None] for x in (q, k))  # [B, T, G, K, 1]
    decay, noise, precision = log_decay.to(dtype).exp(), process_noise.to(dtype), precision.to(dtype)[..., None, :]
    history = v.new_zeros(*cells, 0, dtype=dtype)  # what mu makes of each value so far
    rows, initial = [v.new_zeros(sizes["B"], sizes["G"], 0, sizes["V"], length, dtype=dtype)], []
    for t in range(length):
        query, key = queries[:, t], keys[:, t]
        write = key * precision[:, t]
        predicted = decay**2 * var + noise
        shrink = 1 / (1 + key * write * predicted)
        var, gate = predicted * shrink, decay * shrink
        mean = gate * mean
        history = torch.cat([history * gate[..., None], (var * write)[..., None]], -1)
        rows.append(pad((query[..., None] * history).sum(2), (0, length - t - 1))[:, :, None])
        initial.append((query * mean).sum(2))
    weights = torch.cat(rows, 2).transpose(2, 3)
    return KalmanMatrix(weights, torch.stack(initial, 1) if initial else torch.zeros_like(v, dtype=dtype))


def _convolve(kernel: Tensor, signal: Tensor) -> Tensor:
    """Causal convolution over time, dimension 0 of `kernel` and 1 of `signal`, long enough not to wrap around."""
    length = kernel.shape[0]
    product = torch.fft.rfft(kernel, n=2 * length, dim=0) * torch.fft.rfft(signal, n=2 * length, dim=1)
    return torch.fft.irfft(product, n=2 * length, dim=1)[:, :length]
