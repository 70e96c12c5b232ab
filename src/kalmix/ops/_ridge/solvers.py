"""Options of `kalmix.ops.ridge`: the ridge and the solver, as immutable values without tensors.

A solver stands for a symmetric linear map close to the inverse of S = H + ridge I. The algorithms are in
`linear_solvers`, `dense_solve` and `triton/solve.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from kalmix.errors import ArgumentError, any_of
from kalmix.validation import MAX_FLOAT, MAX_INT

MIN_NORM = 1e-10  # H counts as 0 below this norm; gradients of order 1 / ||H||^3 are still finite in float32 there
Backward = Literal["implicit", "unrolled"]


def _check_positive(name: str, value: object, kind: type) -> None:
    accepted = (int, float) if kind is float else (int,)
    maximum = MAX_FLOAT if isinstance(value, float) else MAX_INT
    if isinstance(value, bool) or not isinstance(value, accepted) or not 0 < value <= maximum:
        bound = f" of at most {maximum:g}" if isinstance(value, accepted) and value > maximum else ""
        noun = "number" if kind is float else "integer"
        raise ArgumentError(name, got=repr(value), expected=f"a positive {noun}{bound}")


@dataclass(frozen=True)
class Adaptive:
    """Ridge proportional to the Frobenius norm of H: lambda_t = factor * ||H_t||_F (Gated KalmaNet, section 4.1).

    Pass it as the argument `ridge` of `kalmix.ops.ridge`. H_t is the op's discounted sum of gain_s k_s k_s' over the
    tokens s <= t, a K x K matrix per value head. Gradients include that of the norm. The condition number of
    H + lambda I is at most 1 + 1 / factor, whatever the keys are. While ||H||_F is below 1e-10, as before the first key
    that is not 0, the read-out is 0.

    Attributes:
        factor: number > 0, the same for all tokens and heads.

    Raises:
        ArgumentError: `factor` is not a finite number above 0; a tensor is not accepted.

    Example:
        >>> from kalmix import ops
        >>> q = torch.randn(1, 32, 2, 16)
        >>> ops.ridge(q, q, q, ridge=ops.Adaptive(0.1)).mean.shape
        torch.Size([1, 32, 2, 16])
    """

    factor: float = 0.02

    def __post_init__(self) -> None:
        _check_positive("factor", self.factor, float)


@dataclass(frozen=True)
class Fixed:
    """Constant ridge, the prior precision of the memory: lambda_t = value (MesaNet).

    Pass it as the argument `ridge` of `kalmix.ops.ridge`. It is not discounted. The op solves with H + value I, where H
    is the discounted sum of gain k k' over the tokens so far, the current one included. So the condition number grows
    with the keys, and iterative solvers may need more iterations than with `Adaptive`.

    Attributes:
        value: number > 0, the same for all tokens and heads, in the unit of gain |k|^2.

    Raises:
        ArgumentError: `value` is not a finite number above 0; a tensor is not accepted.

    Example:
        >>> from kalmix import ops
        >>> q = torch.randn(1, 32, 2, 16)
        >>> ops.ridge(q, q, q, ridge=ops.Fixed(1.0), solver=ops.Exact()).mean.shape
        torch.Size([1, 32, 2, 16])
    """

    value: float = 0.25

    def __post_init__(self) -> None:
        _check_positive("value", self.value, float)


Ridge = Adaptive | Fixed


@dataclass(frozen=True)
class Chebyshev:
    """Chebyshev iteration for (H + lambda I) x = q, the system of `kalmix.ops.ridge` (Algorithm 1 of Gated KalmaNet).

    Pass it as the argument `solver` of the op. H is the discounted sum of gain k k' over the tokens so far, the current
    one included. So all eigenvalues of H + lambda I lie in [lambda, lambda + ||H||_F]. The initial guess is q / (lambda
    + ||H||_F / 2). Each iteration multiplies the error by about (sqrt(c) - 1) / (sqrt(c) + 1), where c = 1 + ||H||_F /
    lambda bounds the condition number: 0.754 for `Adaptive(0.02)`, that is lambda = 0.02 ||H||_F and c = 51. All
    iterations run; too few give an inaccurate result without an error. An iteration takes O(K^2) time per token.

    Attributes:
        iterations: number of iterations after the initial guess, an integer >= 1.
        backward: "implicit" solves one more system for the gradient, with as many iterations (Lemma 2). The relative
            error of the gradient is about that of the solution. All kernels support it. "unrolled" returns the exact
            gradient of the iteration (Algorithm 2), in kernel "reference" only, which the op then chooses by default.

    Raises:
        ArgumentError: `iterations` is not a positive integer, or `backward` is not one of these strings.
        KernelError: in `kalmix.ops.ridge`, if `backward` is "unrolled" and another kernel is requested.

    Example:
        >>> from kalmix import ops
        >>> q = torch.randn(1, 32, 2, 16)
        >>> ops.ridge(q, q, q, solver=ops.Chebyshev(10)).mean.shape
        torch.Size([1, 32, 2, 16])
    """

    iterations: int = 30
    backward: Backward = "implicit"

    def __post_init__(self) -> None:
        _check_positive("iterations", self.iterations, int)
        if not isinstance(self.backward, str) or self.backward not in get_args(Backward):
            raise ArgumentError("backward", got=repr(self.backward), expected=any_of(get_args(Backward)))


@dataclass(frozen=True)
class ConjugateGradient:
    """Conjugate-gradient method of Hestenes and Stiefel for (H + lambda I) x = q, the system of `kalmix.ops.ridge`.

    Pass it as the argument `solver` of the op. H is the discounted sum of gain k k' over the tokens so far, the current
    one included. All kernels support this solver. It starts at 0 and returns the iterate with the smallest residual.
    With the default ridge `Adaptive(0.02)` and the default number of iterations it is as accurate as `Exact` in
    float32. A ridge much smaller than ||H||_F needs more iterations; too few give an inaccurate result without an
    error. With bfloat16 inputs in kernel "triton", `Chebyshev` is more accurate. An iteration takes O(K^2) time per
    token. The gradient is implicit: the backward pass solves one more system by this method, with as many iterations.

    Attributes:
        iterations: number of iterations, an integer >= 1. All of them run. Once the residual of a token is rounding
            error, later ones do not change its solution.

    Raises:
        ArgumentError: `iterations` is not a positive integer.

    Example:
        >>> from kalmix import ops
        >>> q = torch.randn(1, 32, 2, 16)
        >>> ops.ridge(q, q, q, ridge=ops.Fixed(1.0), solver=ops.ConjugateGradient(20)).mean.shape
        torch.Size([1, 32, 2, 16])
    """

    iterations: int = 30

    def __post_init__(self) -> None:
        _check_positive("iterations", self.iterations, int)


@dataclass(frozen=True)
class Exact:
    """Exact solution of (H + lambda I) x = q, the system of `kalmix.ops.ridge`, by Cholesky factorisation.

    Pass it as the argument `solver` of the op. It has no options. H is the discounted sum of gain k k' over the tokens
    so far, the current one included. Up to rounding, the solution and its gradient are exact. It takes O(K^3) time per
    token. Kernels "chunked" and "reference" support it; by default the op chooses one of them, also on a GPU.

    A ridge lost in rounding does not fail: it is raised to eps ||H||_F, where eps is that of the dtype. Where the
    factorisation still fails, it is repeated with a larger diagonal.

    Raises:
        KernelError: in `kalmix.ops.ridge`, if kernel "triton" or an unknown one is requested. In a layer, an unknown
            name is an `ArgumentError`.

    Example:
        >>> from kalmix import ops
        >>> q = torch.randn(1, 32, 2, 16)
        >>> ops.ridge(q, q, q, solver=ops.Exact()).mean.shape
        torch.Size([1, 32, 2, 16])
    """


@dataclass(frozen=True)
class Sketch:
    """Solver of `kalmix.ops.ridge` that searches a random subspace only (appendix L of Gated KalmaNet).

    At each token, `ridge` solves S x = q for the query q. Here S `[K, K]` is H + lambda I, H is the discounted sum of
    gain k k' over the tokens so far, and lambda is the ridge. With an orthonormal basis B `[K, dim]`, a sketch uses x =
    B (B'S B)^{-1} B'q, the vector of the subspace with the smallest e'S e, where e = x - S^{-1} q is the error. The
    columns of B are `dim` of the K cosine functions of a discrete cosine transform, evenly spaced in frequency; row n
    is multiplied by a pseudo-random sign, a hash of `seed` and n. So B depends on `seed`, K and `dim` only: neither on
    data, nor on the device, nor on torch's random state. With dim >= K, B has K columns, and the result is that of
    `solver`.

    Kernel "triton" does not support sketches: the default is another kernel, and `ridge(..., kernel="triton")` raises
    `KernelError`.

    Attributes:
        dim: dimension of the subspace, >= 1.
        solver: solver of the projected system: `Chebyshev`, `ConjugateGradient` or `Exact`. Default: `Chebyshev()`.
            The backward pass solves one more projected system by it. The `backward` of a `Chebyshev` is ignored:
            the gradient is implicit.
        seed: integer that selects the signs; it may be negative.

    Raises:
        ArgumentError: `dim` is not a positive integer, `solver` is not one of these, or `seed` is not an integer of
            magnitude at most 2^31 - 1.

    Example:
        >>> from kalmix import ops
        >>> q = torch.randn(1, 32, 2, 16)
        >>> ops.ridge(q, q, q, solver=ops.Sketch(8, ops.Exact())).mean.shape
        torch.Size([1, 32, 2, 16])
    """

    dim: int
    solver: Chebyshev | ConjugateGradient | Exact = field(default_factory=Chebyshev)
    seed: int = 0

    def __post_init__(self) -> None:
        _check_positive("dim", self.dim, int)
        if not isinstance(self.solver, Chebyshev | ConjugateGradient | Exact):
            raise ArgumentError("solver", got=repr(self.solver), expected="Chebyshev, ConjugateGradient or Exact")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or abs(self.seed) > MAX_INT:
            raise ArgumentError("seed", got=repr(self.seed), expected=f"an integer from {-MAX_INT} to {MAX_INT}")


Solver = Chebyshev | ConjugateGradient | Exact | Sketch
