"""Solvers for the regularised normal equations S = H + ridge I, scaled to a spectrum around 1.

With m the middle of the spectrum [ridge, ridge + ||H||_F], the eigenvalues of S / m are in [1 - rho, 1 + rho]; solvers
work on S / m. For an adaptive ridge, rho is the same for every token, and a small H does not overflow. A ridge below
eps ||H||_F is lost in the rounding of H, which can make the smallest eigenvalues negative; it is raised to that bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from kalmix.ops._ridge.solvers import MIN_NORM, Adaptive, Chebyshev, ConjugateGradient, Exact, Ridge, Sketch, Solver

Rho = Tensor | float


class Scale(NamedTuple):
    """Scale of the systems of some tokens, `[..., 1]` each."""

    inverse: Tensor  # 1 / m; 0 where H counts as 0
    shift: Tensor | float  # ridge / m
    rho: Rho


def spectrum_scale(ridge: Ridge, norm: Tensor) -> Scale:
    """Return the scale of systems whose H has Frobenius norm `norm`; NaN where the squared norm overflowed."""
    if isinstance(ridge, Adaptive):
        factor, nonzero = _factor(ridge, norm.dtype), norm > MIN_NORM
        middle = factor + 0.5
        inverse = torch.where(nonzero, 1 / torch.where(nonzero, middle * norm, 1.0), 0.0)
        return Scale(_nan_if_infinite(inverse, norm), factor / middle, 0.5 / middle)
    strength = ridge_strength(ridge, norm)
    inverse = 1 / (strength + norm / 2)
    return Scale(_nan_if_infinite(inverse, norm), strength * inverse, norm / 2 * inverse)


def ridge_strength(ridge: Ridge, norm: Tensor) -> Tensor:
    """Return the ridge lambda, at least eps times the norm of H, as a differentiable function of the norm."""
    if isinstance(ridge, Adaptive):
        return _factor(ridge, norm.dtype) * norm
    return (torch.finfo(norm.dtype).eps * norm).clamp(min=ridge.value)


def _factor(ridge: Adaptive, dtype: torch.dtype) -> float:
    return max(ridge.factor, torch.finfo(dtype).eps)


def _nan_if_infinite(x: Tensor, norm: Tensor) -> Tensor:
    return torch.where(norm < torch.inf, x, torch.nan)


def frobenius_norm(square: Tensor) -> Tensor:
    """Return the square root of a squared norm; below `MIN_NORM`, 0 with gradient 0."""
    zero = square <= MIN_NORM**2
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


class System(Protocol):
    """Protocol of the scaled systems S / m of some tokens."""

    def apply(self, x: Tensor) -> Tensor:
        """Return S x / m, `[..., K]`."""
        ...

    def matrix(self) -> Tensor:
        """Return S / m as matrices `[..., K, K]`."""
        ...

    def restrict(self, basis: Tensor) -> Self:
        """Return the systems projected on a subspace with orthonormal basis `[K, dim]`."""
        ...


class Matrices(NamedTuple):
    """Systems given as matrices `[..., K, K]`."""

    entries: Tensor

    def apply(self, x: Tensor) -> Tensor:
        return (self.entries @ x[..., None])[..., 0]

    def matrix(self) -> Tensor:
        return self.entries

    def restrict(self, basis: Tensor) -> Matrices:
        return Matrices(basis.mT @ self.entries @ basis)


def solve(solver: Solver, system: System, rhs: Tensor, rho: Rho) -> Tensor:
    """Return the solution m S^{-1} rhs by `solver`, `[..., K]`."""
    if isinstance(solver, Chebyshev):
        return chebyshev(system.apply, rhs, rho, solver.iterations)
    if isinstance(solver, ConjugateGradient):
        return conjugate_gradient(system.apply, rhs, solver.iterations)
    if isinstance(solver, Exact):
        return torch.cholesky_solve(rhs[..., None], cholesky_factor(system.matrix()))[..., 0]
    basis = sketch_basis(solver, rhs)
    return solve(solver.solver, system.restrict(basis), rhs @ basis, rho) @ basis.mT


def cholesky_factor(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky factors of systems S / m, `[..., K, K]`, whose eigenvalues are at most 2.

    If a factorisation fails, because rounding of a long sum outweighs the ridge, it is repeated with the bound of
    Higham (Accuracy and Stability of Numerical Algorithms, theorem 10.7) added to the diagonal, then with sqrt(eps).
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    width, eps = matrix.shape[-1], torch.finfo(matrix.dtype).eps
    eye = torch.eye(width, dtype=matrix.dtype, device=matrix.device)
    for shift in (width * (width + 1) * eps, eps**0.5):
        if matrix.device.type == "cpu" and not failed.any():
            break
        regularized, still_failed = torch.linalg.cholesky_ex(matrix + shift * eye)
        factor, failed = (
            torch.where((failed > 0)[..., None, None], regularized, factor),
            torch.where(failed > 0, still_failed, 0),
        )
    return factor


def chebyshev(apply: Callable[[Tensor], Tensor], rhs: Tensor, rho: Rho, iterations: int) -> Tensor:
    """Return the Chebyshev iterate for a spectrum in [1 - rho, 1 + rho] (Algorithm 1 of Gated KalmaNet)."""
    before, x = torch.zeros_like(rhs), rhs
    for weight in chebyshev_weights(rho, iterations):
        before, x = x, x - weight * (apply(x) - rhs) + (weight - 1) * (x - before)
    return x


def chebyshev_weights(rho: Rho, iterations: int) -> list[Rho]:
    """Return the weight of every iteration, between 1 and 2."""
    weights: list[Rho] = []
    for _ in range(iterations):
        weights.append(4 / (4 - rho**2 * (weights[-1] if weights else 2.0)))
    return weights


def conjugate_gradient(apply: Callable[[Tensor], Tensor], rhs: Tensor, iterations: int) -> Tensor:
    """Return the conjugate-gradient iterate with the smallest residual, starting from 0 (Hestenes and Stiefel).

    The residual can grow between iterations. A token stops when its residual is rounding error or its curvature is not
    positive; later steps would only add noise.
    """
    x, residual, direction = torch.zeros_like(rhs), rhs, rhs
    square = residual.square().sum(-1, keepdim=True)
    best, smallest = x, square
    threshold = (0.1 * torch.finfo(rhs.dtype).eps) ** 2 * square
    for _ in range(iterations):
        image = apply(direction)
        step = ratio(square, (direction * image).sum(-1, keepdim=True))
        x, last_square = torch.addcmul(x, step, direction), square
        residual = torch.addcmul(residual, step, image, value=-1)
        square = residual.square().sum(-1, keepdim=True)
        best = torch.lerp(best, x, (square < smallest).to(x.dtype))  # weight 0 or 1: faster than `where` on a CPU
        smallest = torch.minimum(square, smallest)
        square = square * ((square > threshold) & (step > 0))
        direction = torch.addcmul(residual, ratio(square, last_square), direction)
    return best


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, or 0 where the denominator is not positive. Its gradient is not valid there."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def sketch_basis(sketch: Sketch, like: Tensor) -> Tensor:
    """Return the orthonormal basis `[K, dim]` of a sketch, with the dtype and device of `like` `[..., K]`.

    It is a subsampled randomised cosine transform: `dim` evenly spaced cosines, with pseudo-random signs of the keys.
    """
    width = like.shape[-1]
    dim = min(sketch.dim, width)
    key, column = (torch.arange(n, dtype=torch.float64, device=like.device) for n in (width, dim))
    frequency = (column * width / dim).floor()
    cosines = torch.cos((key[:, None] + 0.5) * frequency * math.pi / width)
    one = torch.ones_like(frequency)
    length = (torch.where(frequency == 0, one, 2 * one) / width).sqrt()
    return (random_signs(sketch.seed, width, like.device)[:, None] * cosines * length).to(like.dtype)


def random_signs(seed: int, count: int, device: torch.device) -> Tensor:
    """Return pseudo-random signs `[count]`, 1 or -1, the same on every device."""
    position = torch.arange(count, device=device)
    bits = _hash_bits(_hash_bits(torch.full_like(position, seed)) + position)
    return torch.where(bits % 2 == 1, -1.0, 1.0)


def _hash_bits(x: Tensor) -> Tensor:
    """Hash the lowest 32 bits of integers; the factor is below 2^31, so that no product exceeds int64."""
    x = x & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def encode_solver(solver: Solver) -> list[int]:
    """Encode a solver as a list of integers, the form that a custom op accepts; `backward` is not encoded.

    The list is [kind, iterations], followed by [dim, seed] for a sketch.
    """
    inner_solver = solver.solver if isinstance(solver, Sketch) else solver
    kind = (Chebyshev, ConjugateGradient, Exact).index(type(inner_solver))
    sketch = [solver.dim, solver.seed] if isinstance(solver, Sketch) else []
    return [kind, 0 if isinstance(inner_solver, Exact) else inner_solver.iterations, *sketch]


def decode_solver(code: list[int]) -> Solver:
    """Return the solver that `encode_solver` encoded."""
    kind, iterations, *sketch = code
    inner_solver = Exact() if kind == 2 else ConjugateGradient(iterations) if kind == 1 else Chebyshev(iterations)
    return Sketch(sketch[0], inner_solver, sketch[1]) if sketch else inner_solver
