"""The op `additive`: a memory that only adds (linear attention, RetNet, GLA, Mamba-2)."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.kernels import KERNELS
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, clone_belief
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered, belief_dtype

PER_HEAD, PER_KEY = "B T G", "B T G K"


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
    belief: PointBelief | None = None,
    segments: Segments | None = None,
    kernel: str | None = None,
) -> Filtered:
    r"""A decaying sum of outer products, equation 19 of Memory by Design: exact under its latent-input model.

        M_t = A_t M_{t-1} + g_t k_t v_t',   mean_t = M_t' q_t,   A_t = exp(log_decay)

    Args:
        q: `[B, T, H, K]` read-out. Not scaled.
        k: `[B, T, H, K]` write direction; same dtype as `q`.
        v: `[B, T, G, V]` values; same dtype as `q`; value head g reads key head g // (G / H).
        log_decay: `[B, T, G]` or, per key, `[B, T, G, K]`, natural log per token, <= 0; none if absent.
        gain: `[B, T, G]` weight of the write; 1 if absent. Tested up to 1e4, the inverse of a noise of 1e-4.
        belief: prior mean `[N, G, K, V]`; 0 if absent. N is B, or the number of segments.
        segments: which tokens form which sequence; each batch row one sequence if absent.
        kernel: a kernel's name; chosen by device and dtype if absent.

    Returns:
        `Filtered` with mean `[B, T, G, V]` in the dtype of `v`, no variance, and the `PointBelief` after the last
        token, float32 (float64 if the inputs are).

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, naming the argument.
        KernelError: the pinned kernel cannot serve the call.

    Derivatives: every kernel has first derivatives by backward passes; "reference" also has second ones, forward mode
    and `vmap`, for which the others raise `KernelError` (docs/derivatives.md).

    Complexity: O(T K V) work; memory for training O(T (K + V) + T K V / chunk) except in "reference".
    """
    sizes = check_tokens(q, k, v)
    if log_decay is not None:
        check_signal("log_decay", log_decay, (PER_HEAD, PER_KEY), sizes, v, most=0.0)
    if gain is not None:
        check_signal("gain", gain, (PER_HEAD,), sizes, v)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V",), sizes)
    chosen = select_kernel(
        "additive", KERNELS, KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"]), kernel
    )
    if min(sizes.values()) == 0:  # nothing to filter: every kernel may assume there is something
        return Filtered(torch.zeros_like(v), None, clone_belief(belief))
    return chosen(AdditiveSignals(q, k, v, log_decay, gain), belief, segments)


def default_prior(v: Tensor, sizes: dict[str, int]) -> PointBelief:
    """Mean 0."""
    return PointBelief(v.new_zeros((), dtype=belief_dtype(v.dtype)).expand(tuple(sizes[x] for x in "NGKV")))
