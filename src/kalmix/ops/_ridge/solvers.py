"""How a ridge regression is regularised and solved, as values: what `kalmix.ops.ridge` takes, what a design fixes.

A solver stands for a symmetric linear map close to the inverse of S = H + ridge I. Everything here is data; the
algorithms are in `kalmix.ops._ridge.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from kalmix.errors import ArgumentError, any_of
from kalmix.validation import MAX_FLOAT, MAX_INT

MIN_NORM = 1e-10  # a norm of H below which nothing has been written: gradients, like 1 / ||H||^3, are still float32
Backward = Literal["implicit", "unrolled"]


def _check_positive(name: str, value: object, kind: type) -> None:
    accepted = (int, float) if kind is float else (int,)
    most = MAX_FLOAT if isinstance(value, float) else MAX_INT
    if isinstance(value, bool) or not isinstance(value, accepted) or not 0 < value <= most:
        raise ArgumentError(name, got=repr(value), expected=f"a positive {'number' if kind is float else 'integer'}")


@dataclass(frozen=True)
class Adaptive:
    """A ridge of `factor` times the Frobenius norm of H: the condition number is at most 1 + 1 / factor.

    Gated KalmaNet, section 4.1. While nothing has been written the ridge is 0, and so is what is read.
    """

    factor: float = 0.02

    def __post_init__(self) -> None:
        _check_positive("factor", self.factor, float)


@dataclass(frozen=True)
class Fixed:
    """A constant ridge, as MesaNet has it: the prior precision of the memory."""

    value: float = 0.25

    def __post_init__(self) -> None:
        _check_positive("value", self.value, float)


Ridge = Adaptive | Fixed


@dataclass(frozen=True)
class Chebyshev:
    """Chebyshev iteration over the spectrum [ridge, ridge + ||H||_F] (Algorithm 1 of Gated KalmaNet).

    The error shrinks by (sqrt(c) - 1) / (sqrt(c) + 1) an iteration, c = 1 + 1 / factor: by 0.754 at `Adaptive(0.02)`.

    Attributes:
        iterations: after the first guess.
        backward: "implicit" solves once more for the gradient (Lemma 2), exact up to the error of the solution;
            "unrolled" is the gradient of the iteration itself (Algorithm 2, which runs it backwards in constant
            memory), exact whatever the error.
    """

    iterations: int = 30
    backward: Backward = "implicit"

    def __post_init__(self) -> None:
        _check_positive("iterations", self.iterations, int)
        if not isinstance(self.backward, str) or self.backward not in get_args(Backward):
            raise ArgumentError("backward", got=repr(self.backward), expected=any_of(get_args(Backward)))


@dataclass(frozen=True)
class ConjugateGradient:
    """Conjugate gradients, from 0, with nothing added to divisors.

    In float32 as accurate as Cholesky after a few dozen iterations; where products are rounded to bfloat16 `Chebyshev`,
    with its residual carried along, is the more accurate (docs/results/solvers.md).
    """

    iterations: int = 30

    def __post_init__(self) -> None:
        _check_positive("iterations", self.iterations, int)


@dataclass(frozen=True)
class Exact:
    """Cholesky factorisation: O(K^3) a token."""


@dataclass(frozen=True)
class Sketch:
    """The best solution among `dim` random directions (section L of Gated KalmaNet): H, q and U projected.

    Attributes:
        dim: directions, an orthonormal basis whose signs `seed` chooses; all there are if as many as keys are wide.
        solver: solves among them.
    """

    dim: int
    solver: Chebyshev | ConjugateGradient | Exact = field(default_factory=Chebyshev)
    seed: int = 0

    def __post_init__(self) -> None:
        _check_positive("dim", self.dim, int)
        if not isinstance(self.solver, Chebyshev | ConjugateGradient | Exact):
            raise ArgumentError("solver", got=repr(self.solver), expected="Chebyshev, ConjugateGradient or Exact")


Solver = Chebyshev | ConjugateGradient | Exact | Sketch
