"""The iterations of `kalmix.ops._ridge.linear_solvers` with everything on show: each iterate, each divisor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._ridge.linear_solvers import chebyshev_weights, ratio
from kalmix_bench.experiments.solvers.systems import Arithmetic, Systems

PUBLISHED = 1e-5  # what MesaNet's kernels (flash-linear-attention) add to both divisors of conjugate gradients


def radius(factor: float) -> float:
    """Half the width of the spectrum [a, 1 + a] over its middle: Chebyshev's rho."""
    return 0.5 / (factor + 0.5)


def rate(factor: float) -> float:
    """What an iteration of Chebyshev leaves of the error in the end, (sqrt(c) - 1) / (sqrt(c) + 1), c = 1 + 1 / a."""
    root = (1 + 1 / factor) ** 0.5
    return (root - 1) / (root + 1)


def chebyshev(systems: Systems, rhs: Tensor, iterations: int, arithmetic: Arithmetic) -> Iterator[Tensor]:
    """Algorithm 1 of Gated KalmaNet: x_0, the first guess, to x_r."""
    middle, stored = systems.factor + 0.5, arithmetic.round_vector
    before, x = torch.zeros_like(rhs), stored(rhs / middle)
    yield x
    for weight in chebyshev_weights(radius(systems.factor), iterations):
        pull = systems.apply(x, arithmetic) - rhs
        before, x = x, stored(x - weight / middle * pull + (weight - 1) * (x - before))
        yield x


def chebyshev_residual_form(systems: Systems, rhs: Tensor, iterations: int, arithmetic: Arithmetic) -> Iterator[Tensor]:
    """The same iterates, the residual carried along: what S multiplies, and rounding spoils, are vanishing steps."""
    middle, stored = systems.factor + 0.5, arithmetic.round_vector
    step = stored(rhs / middle)
    x, residual = step, rhs
    yield x
    for weight in chebyshev_weights(radius(systems.factor), iterations):
        residual = stored(residual - systems.apply(step, arithmetic))
        step = stored(weight / middle * residual + (weight - 1) * step)
        x = stored(x + step)
        yield x


class Conjugate(NamedTuple):
    """Where conjugate gradients are after some iterations, and what the last one divided by (1 before the first)."""

    x: Tensor
    curvature: Tensor  # p'S p, `[..., 1]`
    square: Tensor  # r'r before it
    direction_ratio: Tensor  # the share of the last direction in the next one, by which its reversal would divide


def conjugate_gradient(
    systems: Systems,
    rhs: Tensor,
    iterations: int,
    arithmetic: Arithmetic,
    epsilon: float = 0.0,
    norm: Tensor | float = 1.0,
) -> Iterator[Conjugate]:
    """Hestenes and Stiefel's, from 0, with `epsilon` added to both divisors; a token whose residual is 0 stays.

    With an `epsilon` it matters how long H is: the iterates are `norm` times those for `norm` times these systems.
    """
    x, residual, stored = torch.zeros_like(rhs), rhs, arithmetic.round_vector
    direction, square = residual, residual.square().sum(-1, keepdim=True)
    yield Conjugate(x, *[torch.ones_like(square)] * 3)
    for _ in range(iterations):
        image = systems.apply(direction, arithmetic)
        curvature = (direction * image).sum(-1, keepdim=True)
        step = ratio(square, curvature + epsilon / norm)
        x, residual, last = stored(x + step * direction), stored(residual - step * image), square
        square = residual.square().sum(-1, keepdim=True)
        direction_ratio = ratio(square, last + epsilon)
        direction = stored(residual + direction_ratio * direction)
        yield Conjugate(x, curvature, last, direction_ratio)


def reverse_chebyshev(
    systems: Systems, rhs: Tensor, last: Sequence[Tensor], iterations: int, arithmetic: Arithmetic
) -> Iterator[Tensor]:
    """Equation 49: from x_r and x_{r-1}, x_{r-2} back to x_0. (The paper adds its last term; it is subtracted.)"""
    middle = systems.factor + 0.5
    after, x = last
    for weight in reversed(chebyshev_weights(radius(systems.factor), iterations)[1:]):
        ahead = weight * (x - (systems.apply(x, arithmetic) - rhs) / middle)
        after, x = x, arithmetic.round_vector((ahead - after) / (weight - 1))
        yield x
