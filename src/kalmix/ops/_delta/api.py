"""Public function of the op `delta`: argument checks and choice of a kernel."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.api import PER_HEAD, PER_KEY, default_prior
from kalmix.ops._delta.kernels import KERNELS
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._shared.dispatch import CheckedCall, checked_call, select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, empty_filtered
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
    r"""Compute the delta rule with decays and gains (DeltaNet, Gated DeltaNet, KDA, Longhorn).

    A memory matrix M `[K, V]` decays at each token, predicts the value from the key, and adds the prediction error
    along a gain vector c:

        M_t = A_t M_{t-1} + c_t (v_t - (A_t M_{t-1})' k_t)',   mean_t = M_t' q_t,   A_t = diag(exp(log_decay_t))

    where c_t = gain_t k_t for a gain per head, or c_t = gain_t for a gain vector. These are equations 17 and 31 of
    *Memory by Design*. The update is that of a Kalman filter: if c_t is the Kalman gain of `kalmix.ops.dense`, which
    `dense` does not return, the means are equal. The memory has no uncertainty.

    With a gain per head, the recursion is stable if 0 <= gain |k|^2 <= 2: keys of norm 1 and gains from 0 to 2, for
    example. Stability is not checked.

    Signals other than q, k and v are in the dtype of `v` or of the belief.

    Args:
        q: `[B, T, H, K]`, queries, in float64, float32, bfloat16 or float16. They are not scaled.
        k: `[B, T, H, K]`, keys (observation vectors), in the dtype of `q`. They are not normalized.
        v: `[B, T, G, V]`, observed values, in the dtype of `q`. G must be a multiple of H; value head g
            uses key head g // (G / H), with its own gain and decay.
        gain: `[B, T, G]` to write along the key, or `[B, T, G, K]`, the vector to write along; any sign. 0 means no
            write, and 1 with a key of norm 1 replaces the stored value. Float32 results are tested with gains per
            head with 0 <= gain |k|^2 <= 1, and with gain vectors that are Kalman gains for prior variances from 0.1 to
            10 and observation variances of at least 1e-4.
        log_decay: `[B, T, G]` for one decay per value head, or `[B, T, G, K]` for one per value head and row of M (key
            entry). Natural logarithm, per token, <= 0 and finite. Default: no decay.
        belief: prior, with mean `[N, G, K, V]` in float32 (float64 if the inputs are). N is B, or the number of
            segments. Default: mean 0.
        segments: `Segments` that assign tokens to sequences, for packing and padding. Default: each batch row is one
            sequence.
        kernel: "triton", "chunked" or "reference". Default: the fastest that supports the call.

    Returns:
        `Filtered` with mean `[B, T, G, V]` in the dtype of `v`, variance `None`, and the `PointBelief` after the last
        token, in float32 (float64 if the inputs are). Tokens outside every segment have mean 0.

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

    Complexity: O(T K V) time in "triton" and "reference", O(T K (K + V)) in "chunked". Training stores
    O(T (K + V) + T K V / 64) numbers (more with K < 64, short sequences or float32), O(T K V) in "reference".

    Example:
        >>> from kalmix import ops
        >>> q = torch.randn(2, 64, 1, 16)
        >>> k = torch.nn.functional.normalize(torch.randn(2, 64, 1, 16), dim=-1)
        >>> v = torch.randn(2, 64, 4, 8)  # 4 value heads share 1 key head
        >>> mean, _, belief = ops.delta(q, k, v, gain=torch.rand(2, 64, 4), log_decay=-torch.rand(2, 64, 4))
        >>> mean.shape, belief.mean.shape
        (torch.Size([2, 64, 4, 8]), torch.Size([2, 4, 16, 8]))

        With keys of norm 1 and gain 1, the memory returns the value just written under its key:

        >>> torch.allclose(ops.delta(k, k, v, gain=torch.ones(2, 64, 4)).mean, v, atol=1e-4)
        True
    """
    signals = DeltaSignals(q, k, v, gain, log_decay)
    call = checked_call(_check, signals, belief, segments, kernel)
    if call.is_empty:
        return empty_filtered(signals, call.belief)
    if call.kernel.triton:
        return call.kernel(signals, call.belief, segments, belief is None)
    return call.kernel(signals, call.belief, segments)


def _check(
    signals: DeltaSignals, belief: PointBelief | None, segments: Segments | None, kernel: str | None
) -> CheckedCall:
    """Check the arguments of `delta`, and select a kernel."""
    q, k, v, gain, log_decay = signals
    sizes = check_tokens(q, k, v)
    check_signal("gain", gain, (PER_HEAD, PER_KEY), sizes, v)
    if log_decay is not None:
        check_signal("log_decay", log_decay, (PER_HEAD, PER_KEY), sizes, v, maximum=0.0)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V",), sizes)
    features = frozenset({"value heads of width 1"} if sizes["V"] == 1 else ())
    request = KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"], features)
    selected = select_kernel("delta", KERNELS, request, kernel)
    return CheckedCall(selected, belief, min(sizes.values()) == 0)
