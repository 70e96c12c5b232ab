"""Public function of the op `diagonal`: argument checks and choice of a kernel."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.kernels import KERNELS
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.constants import filled
from kalmix.ops._shared.dispatch import CheckedCall, checked_call, select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, empty_filtered
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered, belief_dtype

DYNAMICS = ("G K V", "B T G K V")  # layouts of `log_decay` and `process_noise`


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
    r"""Filter a memory of independent scalar Kalman filters, one per entry of the memory (Kalman Linear Attention).

    Every entry (n, d) of the memory `[K, V]` is a Gaussian cell with mean mu and variance s. Each token decays the
    cell, adds process noise, and observes v_d = k_n mu + noise. Cells do not interact: each of the K cells of column d
    takes v_d as its own observation, and the read-out sums over them. These are equations 16 to 23 of *Kalman Linear
    Attention*, for s instead of its inverse. With a = exp(log_decay), a token computes

        s  = a^2 s + process_noise,   mu = a mu               predict
        s  = s / (1 + k_n^2 precision_d s)                    update
        mu = mu + s k_n precision_d (v_d - k_n mu)
        mean_d = sum_n q_n mu,   variance_d = sum_n q_n^2 s   read-out, after the update

    The variance is that of the noise-free read-out; an observation of it would add 1 / precision_d.

    Signals other than q, k and v are in the dtype of `v` or of the belief.

    Args:
        q: `[B, T, H, K]`, queries, in float64, float32, bfloat16 or float16. They are not scaled.
        k: `[B, T, H, K]`, keys (observation vectors), in the dtype of `q`.
        v: `[B, T, G, V]`, observed values, in the dtype of `q`. G must be a multiple of H; value head g
            uses key head g // (G / H).
        precision: `[B, T, G, V]`, inverse variance of the observation, >= 0. A precision of 0 means no observation.
            Float32 results are tested up to 1e4, a noise variance of 1e-4.
        log_decay: `[G, K, V]`, natural logarithm of the decay per token, <= 0 and finite. 0 means no decay.
        process_noise: `[G, K, V]`, variance added at each token, >= 0. Either of `log_decay` and `process_noise` may
            also be `[B, T, G, K, V]`, different at each token (equations 7 and 8); only "reference" supports that.
        belief: prior, with mean and variance `[N, G, K, V]` in float32 (float64 if the inputs are), variance >= 0. N is
            B, or the number of segments. Default: mean 0 and variance 1.
        variance: also return the variance of the read-out.
        segments: `Segments` that assign tokens to sequences, for packing and padding. Default: each batch row is one
            sequence.
        kernel: "cuda", "triton", "chunked" or "reference". Default: the fastest that supports the call.

    Returns:
        `Filtered` with mean `[B, T, G, V]` in the dtype of `v`, variance `[B, T, G, V]` in the dtype of the belief
        (`None` unless `variance=True`), and the `DiagonalBelief` after the last token, in float32 (float64 if the
        inputs are). Tokens outside every segment have mean and variance 0.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.
        KernelError: the requested kernel is unknown or does not support the call.

    Every kernel supports gradients of first order. Only "reference" supports gradients of higher order, forward-mode
    derivatives and `torch.func.vmap`; the others raise `KernelError`, in the first backward pass if it has
    `create_graph=True`. "reference" is the default inside `torch.func`, in forward mode, and for very short sequences
    on a CPU. Pass `kernel="reference"` for gradients of higher order.

    Values, NaN and infinity included, are checked on CPUs, and on GPUs inside `kalmix.checks()`; never in compiled code
    or inside a transform of `torch.func`. Where they are not checked, NaN stays within its sequence; `kalmix.Segments`
    describes its reach.

    Complexity: O(T K V) time. Training stores O(T (K + V) + T K V / 16) numbers in "chunked", O(T (K + V) + T K V / 32)
    in "cuda" and "triton", and O(T K V) in "reference".

    Example:
        >>> from kalmix import ops
        >>> q, k = torch.randn(2, 2, 64, 1, 4)
        >>> v = torch.randn(2, 64, 3, 8)  # 3 value heads share 1 key head
        >>> precision = torch.rand(2, 64, 3, 8)
        >>> dynamics = {"log_decay": torch.full((3, 4, 8), -0.1), "process_noise": torch.full((3, 4, 8), 0.02)}
        >>> mean, variance, belief = ops.diagonal(q, k, v, precision=precision, **dynamics, variance=True)
        >>> mean.shape, variance.shape, belief.variance.shape
        (torch.Size([2, 64, 3, 8]), torch.Size([2, 64, 3, 8]), torch.Size([2, 3, 4, 8]))

        A belief continues a sequence. Two calls give the same result as one:

        >>> before = ops.diagonal(q[:, :40], k[:, :40], v[:, :40], precision=precision[:, :40], **dynamics)
        >>> after = ops.diagonal(
        ...     q[:, 40:], k[:, 40:], v[:, 40:], precision=precision[:, 40:], **dynamics, belief=before.belief
        ... )
        >>> torch.allclose(after.mean, mean[:, 40:], atol=1e-5)
        True
    """
    signals = DiagonalSignals(q, k, v, precision, log_decay, process_noise)
    call = checked_call(_check, signals, belief, segments, variance, kernel)
    if call.is_empty:
        return empty_filtered(signals, call.belief, v.shape[3] if variance else None)
    if call.kernel.triton:
        return call.kernel(signals, call.belief, segments, variance, belief is None)
    return call.kernel(signals, call.belief, segments, variance)


def _check(
    signals: DiagonalSignals,
    belief: DiagonalBelief | None,
    segments: Segments | None,
    variance: bool,
    kernel: str | None,
) -> CheckedCall:
    """Check the arguments of `diagonal`, and select a kernel."""
    q, k, v, precision, log_decay, process_noise = signals
    sizes = check_tokens(q, k, v, variance)
    check_signal("precision", precision, ("B T G V",), sizes, v, minimum=0.0)
    check_signal("log_decay", log_decay, DYNAMICS, sizes, v, maximum=0.0)
    check_signal("process_noise", process_noise, DYNAMICS, sizes, v, minimum=0.0)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V", "N G K V"), sizes)

    per_token = log_decay.ndim == 5 or process_noise.ndim == 5
    request = KernelRequest(
        q.device.type,
        q.dtype,
        sizes["K"],
        sizes["V"],
        sizes["T"],
        required_features=frozenset({"dynamics that differ from token to token"} if per_token else ()),
    )
    selected = select_kernel("diagonal", KERNELS, request, kernel)
    return CheckedCall(selected, belief, min(sizes.values()) == 0)


def default_prior(v: Tensor, sizes: dict[str, int]) -> DiagonalBelief:
    """Return the default prior: mean 0 and variance 1."""
    shape, dtype = tuple(sizes[x] for x in "NGKV"), belief_dtype(v.dtype)
    return DiagonalBelief(*(filled(x, shape, dtype, v.device) for x in (0.0, 1.0)))
