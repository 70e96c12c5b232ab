"""The op `delta`: a memory corrected along the key (DeltaNet, Gated DeltaNet, KDA, Longhorn)."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.api import PER_HEAD, PER_KEY, default_prior
from kalmix.ops._delta.kernels import KERNELS
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, clone_belief
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gain: Tensor,
    log_decay: Tensor | None = None,
    belief: PointBelief | None = None,
    segments: Segments | None = None,
    kernel: str | None = None,
) -> Filtered:
    r"""The delta rule, equations 17 and 31 of Memory by Design: a Kalman filter's mean, for any gain.

        M_t = A_t M_{t-1} + c_t (v_t - (A_t M_{t-1})' k_t)',   mean_t = M_t' q_t,   A_t = exp(log_decay)

    where c_t = gain k_t or, with a vector gain, c_t = gain. With the gains of `kalmix.ops.dense` it is its mean.

    Args:
        q: `[B, T, H, K]` read-out. Not scaled.
        k: `[B, T, H, K]` observation operator; same dtype as `q`. The filter is stable where 0 <= k'c <= 2.
        v: `[B, T, G, V]` observed values; same dtype as `q`; value head g reads key head g // (G / H).
        gain: `[B, T, G]` write along the key, or `[B, T, G, K]` write along this vector. Gains of filters are tested
            for observation noises from 1e-4 on.
        log_decay: `[B, T, G]` or, per key, `[B, T, G, K]`, natural log per token, <= 0; none if absent.
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
    check_signal("gain", gain, (PER_HEAD, PER_KEY), sizes, v)
    if log_decay is not None:
        check_signal("log_decay", log_decay, (PER_HEAD, PER_KEY), sizes, v, most=0.0)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V",), sizes)
    needs = frozenset({"value heads of width 1"} if sizes["V"] == 1 else ())
    chosen = select_kernel(
        "delta", KERNELS, KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"], needs), kernel
    )
    if min(sizes.values()) == 0:  # nothing to filter: every kernel may assume there is something
        return Filtered(torch.zeros_like(v), None, clone_belief(belief))
    return chosen(DeltaSignals(q, k, v, gain, log_decay), belief, segments)
