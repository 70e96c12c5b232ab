"""Iterations of `kalmix.ops._ridge.linear_solvers` that expose each iterate and each divisor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._ridge.linear_solvers import chebyshev_weights, ratio
from kalmix_bench.experiments.solvers.systems import Arithmetic, Systems

PUBLISHED = 1e-5  # MesaNet's kernels (flash-linear-attention) add it to both divisors of CG


def radius(factor: float) -> float:
    """Return Chebyshev's rho: half the width of the spectrum [a, 1 + a] divided by its midpoint."""
    return 0.5 / (factor + 0.5)


def rate(factor: float) -> float:
    """Return Chebyshev's asymptotic error factor per iteration, (sqrt(c) - 1) / (sqrt(c) + 1) with c = 1 + 1 / a."""
    root = (1 + 1 / factor) ** 0.5
    return (root - 1) / (root + 1)


def chebyshev(systems: Systems, rhs: Tensor, iterations: int, arithmetic: Arithmetic) -> Iterator[Tensor]:
    """Yield the iterates x_0 (initial guess) to x_r of Algorithm 1 of Gated KalmaNet."""
    middle, round_vector = systems.factor + 0.5, arithmetic.round_vector
    before, x = torch.zeros_like(rhs), round_vector(rhs / middle)
    yield x
    for weight in chebyshev_weights(radius(systems.factor), iterations):
        pull = systems.apply(x, arithmetic) - rhs
        before, x = x, round_vector(x - weight / middle * pull + (weight - 1) * (x - before))
        yield x


def chebyshev_residual_form(systems: Systems, rhs: Tensor, iterations: int, arithmetic: Arithmetic) -> Iterator[Tensor]:
    """Yield the same iterates with an updated residual: S multiplies steps, which vanish, so rounding errors vanish
    too.
    """
    middle, round_vector = systems.factor + 0.5, arithmetic.round_vector
    step = round_vector(rhs / middle)
    x, residual = step, rhs
    yield x
    for weight in chebyshev_weights(radius(systems.factor), iterations):
        residual = round_vector(residual - systems.apply(step, arithmetic))
        step = round_vector(weight / middle * residual + (weight - 1) * step)
        x = round_vector(x + step)
        yield x


class Conjugate(NamedTuple):
    """Iterate of conjugate gradients, and the divisors of the last iteration (1 before the first)."""

    x: Tensor
    curvature: Tensor  # p'S p, `[..., 1]`
    square: Tensor  # r'r before it
    direction_ratio: Tensor  # share of the last direction in the next one; a reversed iteration divides by it


def conjugate_gradient(
    systems: Systems,
    rhs: Tensor,
    iterations: int,
    arithmetic: Arithmetic,
    epsilon: float = 0.0,
    norm: Tensor | float = 1.0,
) -> Iterator[Conjugate]:
    """Yield the iterates of Hestenes and Stiefel's method from 0, with `epsilon` added to both divisors.

    A token with residual 0 does not change. With an `epsilon` the norm of H matters: the iterates are `norm` times
    those
    for `norm` times these systems.
    """
    x, residual, round_vector = torch.zeros_like(rhs), rhs, arithmetic.round_vector
    direction, square = residual, residual.square().sum(-1, keepdim=True)
    yield Conjugate(x, *[torch.ones_like(square)] * 3)
    for _ in range(iterations):
        image = systems.apply(direction, arithmetic)
        curvature = (direction * image).sum(-1, keepdim=True)
        step = ratio(square, curvature + epsilon / norm)
        x, residual, last = round_vector(x + step * direction), round_vector(residual - step * image), square
        square = residual.square().sum(-1, keepdim=True)
        direction_ratio = ratio(square, last + epsilon)
        direction = round_vector(residual + direction_ratio * direction)
        yield Conjugate(x, curvature, last, direction_ratio)


def reverse_chebyshev(
    systems: Systems, rhs: Tensor, last: Sequence[Tensor], iterations: int, arithmetic: Arithmetic
) -> Iterator[Tensor]:
    """Yield x_{r-2} back to x_0 from x_r and x_{r-1} (equation 49). The paper adds the last term; it must be
    subtracted.
    """
    middle = systems.factor + 0.5
    after, x = last
    for weight in reversed(chebyshev_weights(radius(systems.factor), iterations)[1:]):
        ahead = weight * (x - (systems.apply(x, arithmetic) - rhs) / middle)
        after, x = x, arithmetic.round_vector((ahead - after) / (weight - 1))
        yield x
