"""The op `ridge`: regression over the whole past, solved at every token (Gated KalmaNet, MesaNet)."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import RidgeBelief
from kalmix.errors import ArgumentError
from kalmix.ops._ridge.kernels import KERNELS, required_features
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev, ConjugateGradient, Exact, Fixed, Ridge, Sketch, Solver
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, clone_belief
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
    r"""Ridge regression of all values seen on all keys seen, with forgetting: Gated KalmaNet, equations 3 and (CH).

        H_t = a_t H_{t-1} + g_t k_t k_t',   U_t = a_t U_{t-1} + g_t k_t v_t',   a_t = exp(log_decay)
        x_t = (H_t + lambda_t I)^{-1} q_t
        mean = U_t' (mix x_t + (1 - mix) q_t),   variance = q_t' x_t

    It is the Kalman filter of a memory that holds still, in information form: noise 1 / g_t, prior precision lambda_t,
    and at every token only a_t of what was known. The variance is that of the read-out x'U, for a noise of 1. Where
    nothing has been written yet (||H||_F below 1e-10) under an adaptive ridge, x and the variance are 0.

    No dtype resolves a ridge far below H: lambda_t is at least eps ||H_t||_F, with eps 1.2e-7 in float32, 2.2e-16 in
    float64 and 1e-3 where "triton" keeps H in bfloat16. A variance is then that of the raised ridge. In float32
    ||H||_F must stay below 1e12 for exact gradients, and below 1e19: beyond, its square overflows and the mean is NaN.

    Args:
        q: `[B, T, H, K]` read-out. Not scaled.
        k: `[B, T, H, K]` regressor; same dtype as `q`. 0 is no evidence.
        v: `[B, T, G, V]` regressed values; same dtype as `q`; value head g reads key head g // (G / H).
        log_decay: `[B, T, G]` forgetting, natural log per token, <= 0; none if absent.
        gain: `[B, T, G]` weight of the token, >= 0; 1 if absent. Tested up to 1e4, the inverse of a noise of 1e-4.
        ridge: `Adaptive(a)`, lambda_t = a ||H_t||_F, which a bare number means, or `Fixed(value)`.
        mix: `[B, T, G]` share of the solution, 0 to 1, the rest is the query itself (the alpha-connection, section
            C); 1 if absent.
        solver: `Chebyshev(iterations)`, `ConjugateGradient(iterations)`, `Exact()` or `Sketch(dim, solver)`. Gradients
            are implicit (Lemma 2), off by about as much as the solution is; those of `Chebyshev(iterations,
            backward="unrolled")` are the iteration's own (Algorithm 2), by "reference" only.
        belief: prior, cross `[N, G, K, V]` and gram `[N, G, K, K]`, symmetric and positive semidefinite; 0 if absent.
            N is B, or the number of segments.
        variance: also return the variance of the read-out.
        segments: which tokens form which sequence; each batch row one sequence if absent.
        kernel: a kernel's name; chosen by device and dtype if absent.

    Returns:
        `Filtered` with mean `[B, T, G, V]` in the dtype of `v`, variance `[B, T, G, 1]` in the dtype of the belief (or
        `None`), and the `RidgeBelief` after the last token, float32 (float64 if the inputs are).

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, naming the argument.
        KernelError: the pinned kernel cannot serve the call.

    Derivatives: every kernel has first derivatives by backward passes; "reference" also has second ones, forward mode
    and `vmap`, for which the others raise `KernelError` (docs/derivatives.md).

    Complexity: O(T K (K r + V)) work for r iterations; memory for training O(T (K + V) + T K (K + V) / chunk) except
    in "reference".
    """
    if isinstance(ridge, int | float):
        ridge = Adaptive(ridge)
    if not isinstance(ridge, Adaptive | Fixed):
        raise ArgumentError("ridge", got=repr(ridge), expected="Adaptive, Fixed or a number")
    if not isinstance(solver, Chebyshev | ConjugateGradient | Exact | Sketch):
        raise ArgumentError("solver", got=repr(solver), expected="Chebyshev, ConjugateGradient, Exact or Sketch")
    sizes = check_tokens(q, k, v, variance)
    if log_decay is not None:
        check_signal("log_decay", log_decay, PER_HEAD, sizes, v, most=0.0)
    if gain is not None:
        check_signal("gain", gain, PER_HEAD, sizes, v, least=0.0)
    if mix is not None:
        check_signal("mix", mix, PER_HEAD, sizes, v, least=0.0, most=1.0)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], q.device)
    belief = check_belief(belief, default_prior(v, sizes), ("N G K V", "N G K K"), sizes)
    request = KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"], required_features(solver))
    implementation = select_kernel("ridge", KERNELS, request, kernel)
    if min(sizes.values()) == 0:  # nothing to filter: every kernel may assume there is something
        zero_variance = torch.zeros_like(v[..., :1], dtype=belief.gram.dtype) if variance else None
        return Filtered(torch.zeros_like(v), zero_variance, clone_belief(belief))
    return implementation(RidgeSignals(q, k, v, log_decay, gain, mix), belief, segments, variance, ridge, solver)


def default_prior(v: Tensor, sizes: dict[str, int]) -> RidgeBelief:
    """Nothing written."""
    zero = v.new_zeros((), dtype=belief_dtype(v.dtype))
    shapes = (tuple(sizes[x] for x in layout) for layout in ("NGKV", "NGKK"))
    return RidgeBelief(*(zero.expand(shape) for shape in shapes))
