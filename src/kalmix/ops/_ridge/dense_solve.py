"""Solving with systems written out, differentiably: by one more solve, or back through the iteration itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import KernelError
from kalmix.ops._ridge.linear_solvers import Matrices, Rho, Scale, chebyshev_weights, solve
from kalmix.ops._ridge.solvers import Chebyshev, Solver
from kalmix.ops._shared.custom_op import once_differentiable
from kalmix.validation import transformed

_UNROLLED, _IMPLICIT = "Chebyshev(backward='unrolled')", "backward='implicit'"


def solution(solver: Solver, gram: Tensor, ridge: Tensor, scale: Scale, rhs: Tensor) -> Tensor:
    """What `solver` takes for (H + ridge I)^{-1} rhs: `[..., K, K]`, `[..., 1]` twice over, `[..., K]`.

    Gradients reach H, the ridge and `rhs`; unrolled ones also what the solver makes of the spectrum.
    """
    unrolled = solver.iterations if isinstance(solver, Chebyshev) and solver.backward == "unrolled" else 0
    inverse = scale.inverse if unrolled else scale.inverse.detach()
    shift = torch.where(inverse > 0, ridge * inverse, _number(scale.shift, ridge).detach())
    matrix = gram * inverse[..., None] + torch.diag_embed(shift.expand_as(rhs))
    if unrolled:
        if transformed():
            raise KernelError(f"{_UNROLLED} has no torch.func transforms and forward-mode derivatives; use {_IMPLICIT}")
        rho = _number(scale.rho, rhs).expand(*rhs.shape[:-1], 1)
        return _Unrolled.apply(matrix, rhs, rho, unrolled) * inverse
    return _implicit(matrix, rhs, _number(scale.rho, rhs).detach(), solver) * inverse


def _number(x: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(x, dtype=like.dtype, device=like.device)


def _implicit(matrix: Tensor, rhs: Tensor, rho: Tensor, solver: Solver) -> Tensor:
    return (_Implicit if torch.compiler.is_compiling() else _ImplicitForward).apply(matrix, rhs, rho, solver)


class _Implicit(torch.autograd.Function):
    """Lemma 2 and equation 12: the gradient of the right side is one more solve, that of S minus its product with x.

    Derivatives, forward and backward, are solves again, so that there are those of every order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, rhs: Tensor, rho: Tensor, solver: Solver) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return solve(solver, Matrices(matrix), rhs, rho)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        matrix, _, rho, ctx.solver = inputs
        ctx.save_for_backward(matrix, output, rho)

    @staticmethod
    def backward(ctx: Any, to_x: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        matrix, x, rho = ctx.saved_tensors
        to_rhs = _implicit(matrix, to_x, rho, ctx.solver)
        return -to_rhs[..., None] * x[..., None, :], to_rhs, None, None


class _ImplicitForward(_Implicit):
    """`_Implicit` with forward-mode derivatives, which the compiler of torch 2.11 refuses to trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Implicit.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0], output, inputs[2])

    @staticmethod
    def jvp(ctx: Any, of_matrix: Tensor, of_rhs: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        matrix, x, rho = ctx.saved_tensors
        return _implicit(matrix, of_rhs - Matrices(of_matrix).apply(x), rho, ctx.solver)


class _Unrolled(torch.autograd.Function):
    r"""Algorithm 2 of Gated KalmaNet: the adjoint of the iteration.

    Forwards, with S scaled to a spectrum in [1 - rho, 1 + rho], w_0 = 2, x_{-1} = 0 and x_0 = q,

        w_i = 4 / (4 - rho^2 w_{i-1}),   x_i = w_i (x_{i-1} - S x_{i-1} + q) - (w_i - 1) x_{i-2},

    where the weight of the first guess is 1, not what equation 52 leaves in its place. The paper runs the iteration
    backwards, which divides by w_i - 1: rounding errors grow by the root of that, and it is 0 where H is. So a pair of
    iterates is kept every `KEPT`, and those between are computed again, which costs no more. Beyond the paper there is
    the gradient for rho, through the weights: the whole is that of the unrolled iteration.
    """

    KEPT = 5

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rhs: Tensor, rho: Tensor, iterations: int) -> Tensor:
        before, x, kept = torch.zeros_like(rhs), rhs, []
        for i, weight in enumerate(chebyshev_weights(rho, iterations)):
            if i % _Unrolled.KEPT == 0:
                kept += [before, x]
            image = Matrices(matrix).apply(x)
            before, x = x, weight * (x - image + rhs) - (weight - 1) * before
        ctx.iterations = iterations
        ctx.save_for_backward(matrix, rhs, rho, *kept)
        return x

    @staticmethod
    @once_differentiable(_UNROLLED, _IMPLICIT)
    def backward(ctx: Any, to_x: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        matrix, rhs, rho, *kept = ctx.saved_tensors
        apply, weights = Matrices(matrix).apply, chebyshev_weights(rho, ctx.iterations)
        to_matrix, to_rhs = torch.zeros_like(matrix), torch.zeros_like(rhs)
        to_rho, to_next_weight = torch.zeros_like(rho), torch.zeros_like(rho)
        after, to_after = torch.zeros_like(rho), torch.zeros_like(to_x)  # the weight and the adjoint of one step later
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for i in reversed(range(ctx.iterations)):
            weight, within = weights[i], i % _Unrolled.KEPT
            if i + 1 == ctx.iterations or within + 1 == _Unrolled.KEPT:
                steps = _again(apply, rhs, weights[i - within : i + 1], kept[2 * (i // _Unrolled.KEPT) :])
            earlier, before, pull = steps[within]
            to_matrix -= (weight * to_x)[..., None] * before[..., None, :]
            to_rhs += weight * to_x
            to_weight = (to_x * (pull - earlier)).sum(-1, keepdim=True) + to_next_weight
            last = weights[i - 1] if i else 2.0
            to_rho += to_weight * weight**2 * rho * last / 2
            to_next_weight = to_weight * weight**2 * rho**2 / 4
            to_before = weight * (to_x - apply(to_x))
            if i + 1 < ctx.iterations:
                to_before -= (after - 1) * to_after
            after, to_after, to_x = weight, to_x, to_before
        return to_matrix, to_rhs + to_x, to_rho, None


def _again(
    apply: Callable[[Tensor], Tensor], rhs: Tensor, weights: Sequence[Rho], kept: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return of each step x_{i-2}, x_{i-1} and x_{i-1} - S x_{i-1} + q, from the pair kept first."""
    (before, x), steps = kept[:2], []
    for weight in weights:
        pull = x - apply(x) + rhs
        steps.append((before, x, pull))
        before, x = x, weight * pull - (weight - 1) * before
    return steps
