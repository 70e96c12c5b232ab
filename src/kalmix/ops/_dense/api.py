"""Public function of the op `dense`: argument checks and choice of a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import DenseBelief
from kalmix.errors import ArgumentError
from kalmix.ops._dense.kernels import KERNELS
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._shared.constants import filled, identity
from kalmix.ops._shared.dispatch import CheckedCall, checked_call, select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, empty_filtered
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import can_check_values

# Smallest supported `obs_noise`, relative to the prior variance p0, by dtype of the belief. Storing a covariance rounds
# it by eps p0, which changes gains by about eps p0 / r^2: 0.1% at this noise.
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
    r"""Filter a memory matrix exactly, with a full covariance between its keys (the Bayesian Layer).

    The columns of the memory `[K, V]` are independent Gaussians that share one covariance P `[K, K]`. Each token decays
    the memory, adds process noise, and observes the value v along the key k. This is the Kalman filter of Proposition 1
    in *Memory by Design* (equations 9 to 13). With mean M, A = diag(exp(log_decay)), r^2 = `obs_noise` and
    l^2 = `process_noise`, a token computes

        Pb = A P A' + l^2 I                               predict
        u  = Pb k,   b = 1 / (r^2 + k'u)                  b u is the Kalman gain
        M  = A M + b u (v - (A M)'k)',   P = Pb - b u u'  update
        mean = M'q,   variance = q'P q                    read-out, after the update

    The variance is that of the noise-free read-out; an observation of it would add r^2.

    With `angle`, rows j and j + K / 2 of the memory are the real and the imaginary part of a complex row (appendix D of
    the paper). A multiplies it by exp(log_decay + i angle). Only the first K / 2 rows receive process noise. The others
    are meant to be hidden: set `q` and `k` to 0 there (not checked).

    Signals other than q, k and v are in the dtype of `v` or of the belief.

    Args:
        q: `[B, T, H, K]`, queries, in float64, float32, bfloat16 or float16. They are not scaled.
        k: `[B, T, H, K]`, keys (observation vectors), in the dtype of `q`. A token with key 0 is not observed.
        v: `[B, T, G, V]`, observed values, in the dtype of `q`. G must be a multiple of H; value head g
            uses key head g // (G / H), with its own noises and decay.
        obs_noise: `[B, T, G]`, variance of the observation, > 0. Values below 1e-4 p
            (2e-13 p if the belief is in float64) raise `ArgumentError` where values are checked, because results lose
            precision there. p is the smaller of 1 and the largest variance in `belief` for this sequence and head; 1
            without `belief`. With keys of larger
            norm or a prior variance above 1, precision is lost at larger values, without an error.
        process_noise: `[B, T, G]`, variance added to every row at each token (with `angle`, to the first K / 2), >= 0.
        log_decay: `[B, T, G]` for one decay per value head, or `[B, T, G, K]` for one per value head and row of M (key
            entry); with `angle`, `[B, T, G]` or `[B, T, G, K / 2]`. Natural logarithm, per token, <= 0 and finite.
            Default: no decay.
        angle: `[B, T, G, K / 2]`, rotation of each pair of rows, in radians per token. K must be even. Default: no
            rotation.
        belief: prior, with mean `[N, G, K, V]` and covariance `[N, G, K, K]` in float32 (float64 if the inputs are). N
            is B, or the number of segments. The covariance must be symmetric and positive semidefinite (not checked).
            Default: mean 0 and covariance I.
        variance: also return the variance of the read-out.
        segments: `Segments` that assign tokens to sequences, for packing and padding. Default: each batch row is one
            sequence.
        kernel: "cuda", "triton", "chunked" or "reference". Default: the fastest that supports the call.

    Returns:
        `Filtered` with mean `[B, T, G, V]` in the dtype of `v`, variance `[B, T, G, 1]` in the dtype of the belief
        (every column of the mean has this variance; `None` unless `variance=True`), and the `DenseBelief` after the
        last token, in float32 (float64 if the inputs are). Tokens outside every segment have mean and variance 0.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.
        KernelError: the requested kernel is unknown or does not support the call.

    Every kernel supports gradients of first order. Only "reference" supports gradients of higher order, forward-mode
    derivatives and `torch.func.vmap`; the others raise `KernelError`, in the first backward pass if it has
    `create_graph=True`. "reference" is the default inside `torch.func`, in forward mode, and for very short sequences
    on a CPU. Pass `kernel="reference"` for gradients of higher order.

    Values, NaN and infinity included, are checked on CPUs, and on GPUs inside `kalmix.checks()`; never in compiled code
    or inside a transform of `torch.func`. Where they are not checked, NaN in one sequence or in padding does not
    affect other sequences, nor earlier tokens of its own sequence, except up to 63 of them in "triton" and "cuda".

    Complexity: O(T K (K + V)) time. Training stores O(T (K + V) + T K (K + V) / 64) numbers, "reference"
    O(T K (K + V)).

    Example:
        >>> from kalmix import ops
        >>> q = torch.randn(2, 64, 1, 16)
        >>> k = torch.nn.functional.normalize(torch.randn(2, 64, 1, 16), dim=-1)
        >>> v = torch.randn(2, 64, 4, 8)  # 4 value heads share 1 key head
        >>> noise = torch.full((2, 64, 4), 0.1)
        >>> mean, variance, belief = ops.dense(q, k, v, obs_noise=noise, process_noise=0.01 * noise, variance=True)
        >>> mean.shape, variance.shape, belief.covariance.shape
        (torch.Size([2, 64, 4, 8]), torch.Size([2, 64, 4, 1]), torch.Size([2, 4, 16, 16]))

        A belief continues a sequence. Two calls give the same result as one:

        >>> first, rest = ({"obs_noise": noise[:, s], "process_noise": 0.01 * noise[:, s]}
        ...                for s in (slice(0, 40), slice(40, 64)))
        >>> before = ops.dense(q[:, :40], k[:, :40], v[:, :40], **first)
        >>> after = ops.dense(q[:, 40:], k[:, 40:], v[:, 40:], **rest, belief=before.belief)
        >>> torch.allclose(after.mean, mean[:, 40:], atol=1e-5)
        True
    """
    signals = DenseSignals(q, k, v, obs_noise, process_noise, log_decay, angle)
    call = checked_call(_check, signals, belief, segments, variance, kernel)
    if call.is_empty:
        return empty_filtered(signals, call.belief, 1 if variance else None)
    return call.kernel(signals, call.belief, segments, variance)


def _check(
    signals: DenseSignals, belief: DenseBelief | None, segments: Segments | None, variance: bool, kernel: str | None
) -> CheckedCall:
    """Check the arguments of `dense`, and select a kernel."""
    q, k, v, obs_noise, process_noise, log_decay, angle = signals
    sizes = check_tokens(q, k, v, variance)
    if angle is not None and sizes["K"] % 2:
        raise ArgumentError("q", problem=f"has width {sizes['K']}", expected="an even width when `angle` is given")
    check_dense_signals(v, sizes, obs_noise, process_noise, log_decay, angle)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V", "N G K K"), sizes)
    features = frozenset({"rotations"} if angle is not None else ())
    request = KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"], features, q.device.index)
    implementation = select_kernel("dense", KERNELS, request, kernel)
    is_empty = min(sizes.values()) == 0
    if not is_empty:
        _check_noise(obs_noise, belief, segments)
    return CheckedCall(implementation, belief, is_empty)


def check_dense_signals(
    v: Tensor,
    sizes: dict[str, int],
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    angle: Tensor | None,
) -> None:
    """Check the signals other than q, k and v, given the sizes by letter."""
    per_row = ("B T G K",)
    if angle is not None:
        per_row = ("B T G P",)
        sizes["P"] = sizes["K"] // 2
        check_signal("angle", angle, per_row, sizes, v)
    if log_decay is not None:
        check_signal("log_decay", log_decay, ("B T G", *per_row), sizes, v, maximum=0.0)
    check_signal("obs_noise", obs_noise, ("B T G",), sizes, v, minimum=torch.finfo(torch.float32).tiny)
    check_signal("process_noise", process_noise, ("B T G",), sizes, v, minimum=0.0)


def _check_noise(obs_noise: Tensor, belief: DenseBelief, segments: Segments | None) -> None:
    """Check that the noise is large enough for the dtype of the belief, if values may be read here.

    A prior variance above 1 counts as 1, because process noise can raise the variance of a belief that is passed on: a
    sequence that is accepted in one call must be accepted in several.
    """
    if not can_check_values(obs_noise):
        return
    noise, min_noise = obs_noise.detach(), LEAST_NOISE[belief.mean.dtype] * (1 - torch.finfo(obs_noise.dtype).eps)
    if float(noise.amin()) >= min_noise:
        return
    variance = belief.covariance.detach().diagonal(dim1=-2, dim2=-1).amax(-1).clamp(max=1.0)[:, None]  # [N, 1, G]
    if segments is not None:
        segment_ids = segments.segment_ids(*noise.shape[:2])
        variance = torch.where((segment_ids >= 0)[..., None], variance[:, 0][segment_ids.clamp(min=0)], 0.0)
    too_small = noise[noise < (min_noise * variance).to(noise.dtype)]
    if too_small.numel():
        raise ArgumentError(
            "obs_noise",
            problem=f"has a minimum of {float(too_small.min()):g}",
            expected=f"values of at least {LEAST_NOISE[belief.mean.dtype]:g} times the prior variance for beliefs in "
            f"{str(belief.mean.dtype).removeprefix('torch.')}",
            hint="Increase it, or use float64 inputs",
        )


def default_prior(v: Tensor, sizes: dict[str, int]) -> DenseBelief:
    """Return the default prior: mean 0 and covariance I."""
    shape, dtype = tuple(sizes[x] for x in "NGKV"), belief_dtype(v.dtype)
    eye = identity(shape[2], dtype, v.device)
    return DenseBelief(filled(0.0, shape, dtype, v.device), eye.expand(*shape[:2], *eye.shape))
