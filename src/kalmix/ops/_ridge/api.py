"""Public function of the op `ridge`: argument checks and choice of a kernel."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import RidgeBelief
from kalmix.errors import ArgumentError
from kalmix.ops._ridge.kernels import KERNELS, required_features
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev, ConjugateGradient, Exact, Fixed, Ridge, Sketch, Solver
from kalmix.ops._shared.constants import filled
from kalmix.ops._shared.dispatch import CheckedCall, checked_call, select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, empty_filtered
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered, belief_dtype

PER_HEAD = ("B T G",)


def ridge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
    ridge: Ridge | float = Adaptive(0.02),  # noqa: B008 - frozen
    mix: Tensor | None = None,
    solver: Solver = Chebyshev(30),  # noqa: B008 - frozen
    belief: RidgeBelief | None = None,
    variance: bool = False,
    segments: Segments | None = None,
    kernel: str | None = None,
) -> Filtered:
    r"""Solve a ridge regression over all past tokens at every token (Gated KalmaNet, MesaNet).

    The state of a value head is two discounted sums over past tokens: H `[K, K]` of k k', and U `[K, V]` of k v'. At
    each token, the op solves a linear system in H and reads U with the solution (equation 3 of *Gated KalmaNet*). With
    a_t = exp(log_decay), g_t = `gain` and m_t = `mix`,

        H_t = a_t H_{t-1} + g_t k_t k_t',   U_t = a_t U_{t-1} + g_t k_t v_t'
        x_t = (H_t + lambda_t I)^{-1} q_t
        mean = U_t'(m_t x_t + (1 - m_t) q_t),   variance = q_t'x_t

    Without `mix`, mean and variance are those of a Kalman filter in information form: a constant memory M `[K, V]` with
    prior precision lambda_t is read along q_t; each past value is M'k plus noise of variance 1 / g, and past
    information is multiplied by a_t at each token. The variance does not depend on `mix`. While ||H_t||_F < 1e-10, an
    adaptive ridge gives x = 0 and variance 0.

    Signals other than q, k and v are in the dtype of `v` or of the belief.

    Args:
        q: `[B, T, H, K]`, queries, in float64, float32, bfloat16 or float16. They are not scaled. In shapes, H is the
            number of key heads.
        k: `[B, T, H, K]`, keys (regressors), in the dtype of `q`. They are not normalized. A token with key 0 adds
            nothing.
        v: `[B, T, G, V]`, values (targets), in the dtype of `q`. G must be a multiple of H; value head g uses key head
            g // (G / H).
        log_decay: `[B, T, G]`, discount of past tokens; natural logarithm, per token, <= 0 and finite. Default: no
            discount.
        gain: `[B, T, G]`, weight of the token, >= 0. Default: 1. Tested up to 1e4, the inverse of a noise of 1e-4.
        ridge: `Adaptive(a)` for lambda_t = a ||H_t||_F, or `Fixed(value)` for a constant. A Python number a > 0 means
            `Adaptive(a)`.
        mix: `[B, T, G]`, share of the solution in the read-out, between 0 and 1; the rest is the query (the
            alpha-connection, appendix C of the paper). Default: 1.
        solver: `Chebyshev(iterations)`, `ConjugateGradient(iterations)`, `Exact()` or `Sketch(dim, solver, seed)`.
        belief: prior, with cross `[N, G, K, V]` (U) and gram `[N, G, K, K]` (H), in float32 (float64 if the inputs
            are). N is B, or the number of segments. The gram must be symmetric and positive semidefinite, which is not
            checked. Default: 0.
        variance: also return the variance of the read-out.
        segments: `Segments` that assign tokens to sequences, for packing and padding. Default: each batch row is one
            sequence.
        kernel: "triton", "chunked" or "reference". Default: the fastest that supports the call.

    Returns:
        `Filtered` with mean `[B, T, G, V]` in the dtype of `v`; variance `[B, T, G, 1]` in the dtype of the belief (one
        value for all columns), `None` unless `variance=True`; and the `RidgeBelief` after the last token, in float32
        (float64 if the inputs are). Tokens outside every segment have mean and variance 0.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.
        KernelError: the requested kernel is unknown or does not support the call.

    Gradients are implicit by default: the backward pass solves one more system (Lemma 2 of the paper), and its error is
    about that of the solution. `Chebyshev(iterations, backward="unrolled")` gives the gradient of the iteration itself
    (Algorithm 2). Only "reference" supports it, and is the default then.

    Every kernel supports gradients of first order. Gradients of higher order, forward-mode derivatives and
    `torch.func.vmap` need "reference" and implicit gradients; otherwise they raise `KernelError`, in the first backward
    pass if it has `create_graph=True`. "reference" is the default inside `torch.func`, in forward mode, and for very
    short sequences on a CPU. Pass `kernel="reference"` for gradients of higher order.

    Values, NaN and infinity included, are checked on CPUs, and on GPUs inside `kalmix.checks()`; never in compiled code
    or inside a transform of `torch.func`.

    Precision: lambda_t is raised to at least eps ||H_t||_F, since a smaller ridge is lost in the rounding of H. Here
    eps is 1e-3 in "triton" with bfloat16 inputs, 2.2e-16 with float64 inputs, and otherwise 1.2e-7. In float32,
    gradients are exact for ||H_t||_F below 1e12. Above 1e19 the squared norm overflows: the mean is NaN, without an
    error.

    Complexity: O(T K (K r + V)) time for r iterations. Training stores O(T (K + V) + T K (K + V) / 64) numbers,
    "reference" O(T K (K + V)).

    Example:
        >>> from kalmix import ops
        >>> q, k = (torch.nn.functional.normalize(torch.randn(2, 64, 1, 16), dim=-1) for _ in range(2))
        >>> v = torch.randn(2, 64, 4, 8)  # 4 value heads share 1 key head
        >>> log_decay = torch.full((2, 64, 4), -0.01)
        >>> mean, variance, belief = ops.ridge(q, k, v, log_decay=log_decay, variance=True)
        >>> mean.shape, variance.shape, belief.gram.shape
        (torch.Size([2, 64, 4, 8]), torch.Size([2, 64, 4, 1]), torch.Size([2, 4, 16, 16]))

        Thirty Chebyshev iterations, the default, are close to the exact solution:

        >>> exact = ops.ridge(q, k, v, log_decay=log_decay, solver=ops.Exact())
        >>> bool((mean - exact.mean).norm() < 0.01 * exact.mean.norm())
        True
    """
    if isinstance(ridge, int | float):
        ridge = Adaptive(ridge)
    if not isinstance(ridge, Adaptive | Fixed):
        raise ArgumentError("ridge", got=repr(ridge), expected="Adaptive, Fixed or a positive number")
    if not isinstance(solver, Chebyshev | ConjugateGradient | Exact | Sketch):
        raise ArgumentError("solver", got=repr(solver), expected="Chebyshev, ConjugateGradient, Exact or Sketch")
    signals = RidgeSignals(q, k, v, log_decay, gain, mix)
    call = checked_call(_check, signals, belief, segments, variance, solver, kernel)
    if call.is_empty:
        return empty_filtered(signals, call.belief, 1 if variance else None)
    options = (variance, ridge, solver)
    if call.kernel.triton:
        return call.kernel(signals, call.belief, segments, *options, belief is None)
    return call.kernel(signals, call.belief, segments, *options)


def _check(
    signals: RidgeSignals,
    belief: RidgeBelief | None,
    segments: Segments | None,
    variance: bool,
    solver: Solver,
    kernel: str | None,
) -> CheckedCall:
    """Check the arguments of `ridge`, and select a kernel."""
    q, k, v, log_decay, gain, mix = signals
    sizes = check_tokens(q, k, v, variance)
    if log_decay is not None:
        check_signal("log_decay", log_decay, PER_HEAD, sizes, v, maximum=0.0)
    if gain is not None:
        check_signal("gain", gain, PER_HEAD, sizes, v, minimum=0.0)
    if mix is not None:
        check_signal("mix", mix, PER_HEAD, sizes, v, minimum=0.0, maximum=1.0)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V", "N G K K"), sizes)
    request = KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"], required_features(solver))
    implementation = select_kernel("ridge", KERNELS, request, kernel)
    return CheckedCall(implementation, belief, min(sizes.values()) == 0)


def default_prior(v: Tensor, sizes: dict[str, int]) -> RidgeBelief:
    """Return the default prior: both sums 0."""
    dtype, shapes = belief_dtype(v.dtype), ([sizes[x] for x in layout] for layout in ("NGKV", "NGKK"))
    return RidgeBelief(*(filled(0.0, shape, dtype, v.device) for shape in shapes))
