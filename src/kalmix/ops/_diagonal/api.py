"""The op `diagonal`: independent Gaussian cells, each observed through its key (Kalman Linear Attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.kernels import KERNELS
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, clone_belief
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered, belief_dtype

DYNAMICS = ("G K V", "B T G K V")


def diagonal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    belief: DiagonalBelief | None = None,
    variance: bool = False,
    segments: Segments | None = None,
    kernel: str | None = None,
) -> Filtered:
    r"""Exact Kalman filter over independent cells (key n, channel d), equations 16 to 23 of Kalman Linear Attention.

    Per cell, with a = exp(log_decay), p = process_noise and w = k_n precision_d, mean mu and variance s:

        s~  = a^2 s + p                      predict
        s'  = s~ / (1 + k_n w s~)            update (the Moebius map of equation 16, as a variance)
        mu' = a mu + s' w (v_d - k_n a mu)   update (equation 20)
        mean_d = sum_n q_n mu',   variance_d = sum_n q_n^2 s'

    Args:
        q: `[B, T, H, K]` read-out. Not scaled.
        k: `[B, T, H, K]` observation operator; same dtype as `q`.
        v: `[B, T, G, V]` observed values; same dtype as `q`; value head g reads key head g // (G / H).
        precision: `[B, T, G, V]` inverse variance of the observation, >= 0; 0 is no evidence. Tested up to 1e4, the
            inverse of a noise of 1e-4.
        log_decay: `[G, K, V]` natural log per token, <= 0; 0 holds.
        process_noise: `[G, K, V]` variance added per token, >= 0.
        belief: prior, `[N, G, K, V]` mean and variance (>= 0); mean 0 and variance 1 if absent. N is B, or the
            number of segments.
        variance: also return the variance of the read-out.
        segments: which tokens form which sequence; each batch row one sequence if absent.
        kernel: "triton", "chunked" or "reference"; chosen by device and dtype if absent.

    The kernel "reference" also takes `log_decay` and `process_noise` that differ from token to token,
    `[B, T, G, K, V]` (equations 7 and 8 allow them).

    Returns:
        `Filtered` with mean `[B, T, G, V]` in the dtype of `v`, variance `[B, T, G, V]` in the dtype of the belief
        (or `None`), and the `DiagonalBelief` after the last token, float32 (float64 if the inputs are).

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, naming the argument.
        KernelError: the pinned kernel cannot serve the call.

    Derivatives: every kernel has first derivatives by backward passes; "reference" also has second ones, forward mode
    and `vmap`, for which the others raise `KernelError` (docs/derivatives.md).

    Complexity: O(T K V) work; memory for training O(T (K + V) + T K V / chunk) except in "reference".
    """
    sizes = check_tokens(q, k, v, variance)
    check_signal("precision", precision, ("B T G V",), sizes, v, least=0.0)
    check_signal("log_decay", log_decay, DYNAMICS, sizes, v, most=0.0)
    check_signal("process_noise", process_noise, DYNAMICS, sizes, v, least=0.0)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V", "N G K V"), sizes)

    varying = {"dynamics that differ from token to token"} if log_decay.ndim == 5 or process_noise.ndim == 5 else set()
    request = KernelRequest(
        q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"], required_features=frozenset(varying)
    )
    chosen = select_kernel("diagonal", KERNELS, request, kernel)
    if min(sizes.values()) == 0:  # nothing to filter: every kernel may assume there is something
        spread = torch.zeros_like(v, dtype=belief.mean.dtype) if variance else None
        return Filtered(torch.zeros_like(v), spread, clone_belief(belief))
    return chosen(DiagonalSignals(q, k, v, precision, log_decay, process_noise), belief, segments, variance)


def default_prior(v: Tensor, sizes: dict[str, int]) -> DiagonalBelief:
    """Mean 0 and variance 1."""
    shape, dtype = tuple(sizes[x] for x in "NGKV"), belief_dtype(v.dtype)
    return DiagonalBelief(*(v.new_full((), x, dtype=dtype).expand(shape) for x in (0.0, 1.0)))
