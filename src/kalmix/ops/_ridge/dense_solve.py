"""Differentiable solutions of systems given as matrices, with implicit or unrolled gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import KernelError
from kalmix.ops._ridge.linear_solvers import Matrices, Rho, Scale, chebyshev_weights, solve
from kalmix.ops._ridge.solvers import Chebyshev, Solver
from kalmix.ops._shared.custom_op import once_differentiable
from kalmix.ops._shared.products import product
from kalmix.types import without_autocast
from kalmix.validation import in_transform

_UNROLLED, _IMPLICIT = "Chebyshev(backward='unrolled')", "backward='implicit'"


def solve_differentiable(solver: Solver, gram: Tensor, ridge: Tensor, scale: Scale, rhs: Tensor) -> Tensor:
    """Return the solution of (H + ridge I) x = rhs by `solver`.

    H, the ridge and `rhs` receive gradients. Unrolled gradients include those through the bounds of the spectrum.

    Args:
        solver: algorithm.
        gram: H, `[..., K, K]`.
        ridge: `[..., 1]`.
        scale: scale of the systems, tensors `[..., 1]`.
        rhs: `[..., K]`.

    Raises:
        KernelError: unrolled gradients inside a `torch.func` transform.
    """
    unrolled = solver.iterations if isinstance(solver, Chebyshev) and solver.backward == "unrolled" else 0
    inverse = scale.inverse if unrolled else scale.inverse.detach()
    shift = torch.where(inverse > 0, ridge * inverse, _as_tensor(scale.shift, ridge).detach())
    matrix = gram * inverse[..., None] + torch.diag_embed(shift.expand_as(rhs))
    if unrolled:
        if in_transform():
            raise KernelError(f"{_UNROLLED} does not support torch.func or forward-mode derivatives; use {_IMPLICIT}")
        rho = _as_tensor(scale.rho, rhs).expand(*rhs.shape[:-1], 1)
        return _Unrolled.apply(matrix, rhs, rho, unrolled) * inverse
    return _implicit(matrix, rhs, _as_tensor(scale.rho, rhs).detach(), solver) * inverse


def _as_tensor(x: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(x, dtype=like.dtype, device=like.device)


def _implicit(matrix: Tensor, rhs: Tensor, rho: Tensor, solver: Solver) -> Tensor:
    return (_Implicit if torch.compiler.is_compiling() else _ImplicitForward).apply(matrix, rhs, rho, solver)


class _Implicit(torch.autograd.Function):
    """Solution with implicit gradients (Lemma 2 and equation 12 of Gated KalmaNet).

    The gradient of the right-hand side is y = S^{-1} dx, and that of S is -y x'. Both are computed by the same
    function, so gradients of every order exist.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, rhs: Tensor, rho: Tensor, solver: Solver) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with without_autocast(rhs.device):  # `backward`, which may be called under autocast, solves a system, too
            return solve(solver, Matrices(matrix), rhs, rho)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        matrix, _, rho, ctx.solver = inputs
        ctx.save_for_backward(matrix, output, rho)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        matrix, x, rho = ctx.saved_tensors
        grad_rhs = _implicit(matrix, grad_x, rho, ctx.solver)
        return -grad_rhs[..., None] * x[..., None, :], grad_rhs, None, None


class _ImplicitForward(_Implicit):
    """`_Implicit` with forward-mode derivatives, which torch.compile of torch 2.11 cannot trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Implicit.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0], output, inputs[2])

    @staticmethod
    def jvp(ctx: Any, matrix_tangent: Tensor, rhs_tangent: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        matrix, x, rho = ctx.saved_tensors
        return _implicit(matrix, rhs_tangent - product(matrix_tangent, x[..., None])[..., 0], rho, ctx.solver)


class _Unrolled(torch.autograd.Function):
    r"""Chebyshev iteration with the gradient of the iteration itself (Algorithm 2 of Gated KalmaNet).

    With S scaled to a spectrum in [1 - rho, 1 + rho], w_0 = 2, x_{-1} = 0 and x_0 = q, the iteration is

        w_i = 4 / (4 - rho^2 w_{i-1}),   x_i = w_i (x_{i-1} - S x_{i-1} + q) - (w_i - 1) x_{i-2}.

    The weight of the initial guess is 1; equation 52 of the paper overwrites it by mistake. The paper runs the
    iteration in reverse, which divides by w_i - 1: this amplifies rounding errors, and divides by 0 where H is 0. Here
    a pair of iterates is stored every `CHECKPOINT_INTERVAL` steps and the others are recomputed, at the same cost. The
    gradient of rho, which the paper omits, is included.
    """

    CHECKPOINT_INTERVAL = 5

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rhs: Tensor, rho: Tensor, iterations: int) -> Tensor:
        x_last, x, checkpoints = torch.zeros_like(rhs), rhs, []
        for i, weight in enumerate(chebyshev_weights(rho, iterations)):
            if i % _Unrolled.CHECKPOINT_INTERVAL == 0:
                checkpoints += [x_last, x]
            image = Matrices(matrix).apply(x)
            x_last, x = x, weight * (x - image + rhs) - (weight - 1) * x_last
        ctx.iterations = iterations
        ctx.save_for_backward(matrix, rhs, rho, *checkpoints)
        return x

    @staticmethod
    @once_differentiable(_UNROLLED, _IMPLICIT)
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        matrix, rhs, rho, *checkpoints = ctx.saved_tensors
        weights = chebyshev_weights(rho, ctx.iterations)

        def apply(x: Tensor) -> Tensor:
            return product(matrix, x[..., None])[..., 0]

        grad_matrix, grad_rhs = torch.zeros_like(matrix), torch.zeros_like(rhs)
        grad_rho, grad_next_weight = torch.zeros_like(rho), torch.zeros_like(rho)
        next_weight, grad_next = torch.zeros_like(rho), torch.zeros_like(grad_x)  # of step i + 1
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for i in reversed(range(ctx.iterations)):
            weight, offset = weights[i], i % _Unrolled.CHECKPOINT_INTERVAL
            if i + 1 == ctx.iterations or offset + 1 == _Unrolled.CHECKPOINT_INTERVAL:
                steps = _recompute_iterates(
                    apply, rhs, weights[i - offset : i + 1], checkpoints[2 * (i // _Unrolled.CHECKPOINT_INTERVAL) :]
                )
            x_before_last, x_last, correction = steps[offset]
            grad_matrix -= (weight * grad_x)[..., None] * x_last[..., None, :]
            grad_rhs += weight * grad_x
            grad_weight = (grad_x * (correction - x_before_last)).sum(-1, keepdim=True) + grad_next_weight
            last_weight = weights[i - 1] if i else 2.0
            grad_rho += grad_weight * weight**2 * rho * last_weight / 2
            grad_next_weight = grad_weight * weight**2 * rho**2 / 4
            grad_last = weight * (grad_x - apply(grad_x))
            if i + 1 < ctx.iterations:
                grad_last -= (next_weight - 1) * grad_next
            next_weight, grad_next, grad_x = weight, grad_x, grad_last
        return grad_matrix, grad_rhs + grad_x, grad_rho, None


def _recompute_iterates(
    apply: Callable[[Tensor], Tensor], rhs: Tensor, weights: Sequence[Rho], checkpoints: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Recompute x_{i-2}, x_{i-1} and x_{i-1} - S x_{i-1} + q of each step from the first pair of `checkpoints`."""
    (x_last, x), steps = checkpoints[:2], []
    for weight in weights:
        correction = x - apply(x) + rhs
        steps.append((x_last, x, correction))
        x_last, x = x, weight * correction - (weight - 1) * x_last
    return steps
