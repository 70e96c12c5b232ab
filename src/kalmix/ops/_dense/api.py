"""The op `dense`: a memory with a covariance between its keys (the Bayesian Layer)."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import DenseBelief
from kalmix.errors import ArgumentError
from kalmix.ops._dense.kernels import KERNELS
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, clone_belief
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import can_check_values

# Least noise of an observation relative to the prior's variance p0, for each dtype of the belief. Storing a covariance
# rounds it by eps p0, which makes gains wrong by about eps p0 / r^2: 0.1% at this noise.
LEAST_NOISE = {torch.float32: 1e-4, torch.float64: 2e-13}


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None = None,
    angle: Tensor | None = None,
    belief: DenseBelief | None = None,
    variance: bool = False,
    segments: Segments | None = None,
    kernel: str | None = None,
) -> Filtered:
    r"""Exact Kalman filter over a memory, Proposition 1 of Memory by Design (equations 9 to 13).

    Columns of the memory `[K, V]` are independent and share one covariance P `[K, K]`. With A = exp(log_decay),
    mean M, r^2 = obs_noise and l^2 = process_noise:

        Pb = A P A' + l^2 I                        predict
        u = Pb k,   b = 1 / (r^2 + k'u),   c = b u
        M' = A M + c (v - (A M)' k)',   P' = Pb - b u u'
        mean = M'' q,   variance = q' P' q         of the belief, one for all columns

    With `angle`, key rows come in pairs (j, j + K / 2) that turn by it, as rho e^{i theta} does (appendix D): the first
    half is observed and diffuses, the second is hidden, and q and k should be 0 there.

    Args:
        q: `[B, T, H, K]` read-out. Not scaled.
        k: `[B, T, H, K]` observation operator; same dtype as `q`. 0 is no evidence.
        v: `[B, T, G, V]` observed values; same dtype as `q`; value head g reads key head g // (G / H). Groups of
            columns with noises of their own are value heads that share a key head.
        obs_noise: `[B, T, G]` variance of the observation, > 0; for unit keys at least 1e-4 times the largest prior
            variance of its head (2e-13 times in float64), or the result loses digits. Where values are checked, less
            is refused; a prior variance above 1 counts as 1 there, as process noise may have raised it.
        process_noise: `[B, T, G]` variance added per token, >= 0.
        log_decay: `[B, T, G]` or, per key, `[B, T, G, K]` (with `angle` per pair, `[B, T, G, K / 2]`), natural log per
            token, <= 0; none if absent.
        angle: `[B, T, G, K / 2]` radians per token; no rotation if absent.
        belief: prior, mean `[N, G, K, V]` and covariance `[N, G, K, K]`, symmetric and positive semidefinite; mean 0
            and covariance I if absent. N is B, or the number of segments.
        variance: also return the variance of the read-out.
        segments: which tokens form which sequence; each batch row one sequence if absent.
        kernel: a kernel's name; chosen by device and dtype if absent.

    Returns:
        `Filtered` with mean `[B, T, G, V]` in the dtype of `v`, variance `[B, T, G, 1]` in the dtype of the belief (or
        `None`), and the `DenseBelief` after the last token, float32 (float64 if the inputs are).

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, naming the argument.
        KernelError: the pinned kernel cannot serve the call.

    Derivatives: every kernel has first derivatives by backward passes; "reference" also has second ones, forward mode
    and `vmap`, for which the others raise `KernelError` (docs/derivatives.md).

    Where values are not checked (on a GPU, and in compiled code), NaN in one sequence or in padding reaches no other
    sequence. In "reference" and "chunked" it reaches no earlier token of its own; in "triton" and "cuda" it reaches
    those of its tile.

    Complexity: O(T K (K + V)) work; memory for training O(T (K + V) + T K (K + V) / chunk) except in "reference".
    """
    sizes = check_tokens(q, k, v, variance)
    per_row = ("B T G K",)
    if angle is not None:
        if sizes["K"] % 2:
            raise ArgumentError("q", got=f"{sizes['K']} wide", expected="an even number of key rows where they turn")
        per_row = ("B T G P",)
        sizes["P"] = sizes["K"] // 2
        check_signal("angle", angle, per_row, sizes, v)
    if log_decay is not None:
        check_signal("log_decay", log_decay, ("B T G", *per_row), sizes, v, most=0.0)
    check_signal("obs_noise", obs_noise, ("B T G",), sizes, v, least=torch.finfo(torch.float32).tiny)
    check_signal("process_noise", process_noise, ("B T G",), sizes, v, least=0.0)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V", "N G K K"), sizes)
    needs = frozenset({"rotations"} if angle is not None else ())
    request = KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"], needs, q.device.index)
    chosen = select_kernel("dense", KERNELS, request, kernel)
    if min(sizes.values()) == 0:  # nothing to filter: every kernel may assume there is something
        spread = torch.zeros_like(v[..., :1], dtype=belief.mean.dtype) if variance else None
        return Filtered(torch.zeros_like(v), spread, clone_belief(belief))
    _check_noise(obs_noise, belief, segments)
    signals = DenseSignals(q, k, v, obs_noise, process_noise, log_decay, angle)
    return chosen(signals, belief, segments, variance)


def _check_noise(obs_noise: Tensor, belief: DenseBelief, segments: Segments | None) -> None:
    """Check that the belief's dtype resolves the noise beside the prior's variance, where values may be looked at.

    Variances above 1 count as 1: a sequence that is accepted whole, with a prior of 1, is accepted in pieces, too.
    """
    if not can_check_values(obs_noise):
        return
    noise, least = obs_noise.detach(), LEAST_NOISE[belief.mean.dtype] * (1 - torch.finfo(obs_noise.dtype).eps)
    if float(noise.amin()) >= least:
        return
    variance = belief.covariance.detach().diagonal(dim1=-2, dim2=-1).amax(-1).clamp(max=1.0)[:, None]  # [N, 1, G]
    if segments is not None:
        segment_ids = segments.segment_ids(*noise.shape[:2])
        variance = torch.where((segment_ids >= 0)[..., None], variance[:, 0][segment_ids.clamp(min=0)], 0.0)
    low = noise[noise < (least * variance).to(noise.dtype)]
    if low.numel():
        raise ArgumentError(
            "obs_noise",
            problem=f"has a minimum of {float(low.min()):g}",
            expected=f"values of at least {LEAST_NOISE[belief.mean.dtype]:g} times the prior's variance where "
            f"beliefs are {str(belief.mean.dtype).removeprefix('torch.')}; float64 inputs resolve less",
        )


def default_prior(v: Tensor, sizes: dict[str, int]) -> DenseBelief:
    """Mean 0 and covariance I."""
    shape, dtype = tuple(sizes[x] for x in "NGKV"), belief_dtype(v.dtype)
    eye = torch.eye(shape[2], dtype=dtype, device=v.device)
    return DenseBelief(v.new_zeros((), dtype=dtype).expand(shape), eye.expand(*shape[:2], *eye.shape))
