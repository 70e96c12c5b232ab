"""Public function of the op `additive`: argument checks and choice of a kernel."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.kernels import KERNELS
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._shared.constants import filled
from kalmix.ops._shared.dispatch import CheckedCall, checked_call, select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, empty_filtered
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
    r"""Compute linear attention with decays and gains (linear attention, RetNet, GLA, Mamba-2).

    A memory matrix M `[K, V]` decays at each token and adds the outer product of key and value, weighted by a gain:

        M_t = A_t M_{t-1} + g_t k_t v_t',   mean_t = M_t' q_t,   A_t = diag(exp(log_decay_t))

    The read-out includes the current token. This is equation 19 of *Memory by Design*: a value measures, with noise,
    only what its own token adds to the memory. In `kalmix.ops.delta` and `kalmix.ops.dense`, it measures what the whole
    memory returns for the key. The memory has no uncertainty.

    Signals other than q, k and v are in the dtype of `v` or of the belief.

    Args:
        q: `[B, T, H, K]`, queries, in float64, float32, bfloat16 or float16. They are not scaled.
        k: `[B, T, H, K]`, keys, in the dtype of `q`.
        v: `[B, T, G, V]`, values, in the dtype of `q`. G must be a multiple of H; value head g uses key head
            g // (G / H), with its own decay and gain.
        log_decay: `[B, T, G]` for one decay per value head, or `[B, T, G, K]` for one per value head and row of M (key
            entry). Natural logarithm, per token, <= 0 and finite. Default: no decay.
        gain: `[B, T, G]`, weight of the token's write; it may be negative. Default: 1. Float32 results are tested for
            gains up to 1e4, the inverse of a noise variance of 1e-4.
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

    Complexity: O(T K V) time. Training stores O(T (K + V) + T K V / 64) numbers in "chunked", O(T K V) in "reference".
    "triton" stores M every 64 tokens, too, but every 16 if T <= 64, and otherwise every 32 in float32.

    Example:
        >>> from kalmix import ops
        >>> q, k = torch.randn(2, 2, 64, 1, 16)
        >>> v = torch.randn(2, 64, 4, 8)  # 4 value heads share 1 key head
        >>> log_decay = -torch.rand(2, 64, 4)
        >>> mean, _, belief = ops.additive(q, k, v, log_decay=log_decay)
        >>> mean.shape, belief.mean.shape
        (torch.Size([2, 64, 4, 8]), torch.Size([2, 4, 16, 8]))

        Without decay and gain, it is causal linear attention:

        >>> scores = torch.einsum("bthk,bshk->bts", q, k).tril()
        >>> expected = torch.einsum("bts,bsgv->btgv", scores, v)
        >>> torch.allclose(ops.additive(q, k, v).mean, expected, atol=1e-3)
        True
    """
    signals = AdditiveSignals(q, k, v, log_decay, gain)
    call = checked_call(_check, signals, belief, segments, kernel)
    if call.is_empty:
        return empty_filtered(signals, call.belief)
    if call.kernel.triton:
        return call.kernel(signals, call.belief, segments, belief is None)
    return call.kernel(signals, call.belief, segments)


def _check(
    signals: AdditiveSignals, belief: PointBelief | None, segments: Segments | None, kernel: str | None
) -> CheckedCall:
    """Check the arguments of `additive`, and select a kernel."""
    q, k, v, log_decay, gain = signals
    sizes = check_tokens(q, k, v)
    if log_decay is not None:
        check_signal("log_decay", log_decay, (PER_HEAD, PER_KEY), sizes, v, maximum=0.0)
    if gain is not None:
        check_signal("gain", gain, (PER_HEAD,), sizes, v)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V",), sizes)
    request = KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"])
    selected = select_kernel("additive", KERNELS, request, kernel)
    return CheckedCall(selected, belief, min(sizes.values()) == 0)


def default_prior(v: Tensor, sizes: dict[str, int]) -> PointBelief:
    """Return the default prior: mean 0."""
    return PointBelief(filled(0.0, [sizes[x] for x in "NGKV"], belief_dtype(v.dtype), v.device))
