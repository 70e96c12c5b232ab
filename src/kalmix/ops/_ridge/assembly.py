"""Ridge regression assembled from a kernel of `additive` and a function that solves its normal equations.

H is a memory whose values are its keys. So its norm, its products H x and the read-out are all calls of `additive`.
The gradient through the solution x follows from one correction step, which adds 0 in the forward pass,

    x + S^{-1} (q - H x - ridge x),

and has the derivative of the exact solution (Lemma 2 of Gated KalmaNet). The outer S^{-1} costs one more solve in the
backward pass; the gradients of H x and of the ridge are those of `additive`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief, RidgeBelief
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._ridge.linear_solvers import frobenius_norm, ridge_strength
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Ridge, Solver
from kalmix.ops._shared.custom_op import needs_grad, once_differentiable
from kalmix.segments import Segments
from kalmix.types import Filtered

Memory = Callable[..., Filtered]  # a kernel of `additive`


class NormalEquations(NamedTuple):
    """Linear systems (H + ridge I) x = q of all tokens, given by the keys that H consists of.

    Attributes:
        k: `[B, T, H, K]`.
        log_decay, gain: `[B, T, G]` or `None`.
        norm: `[B, T, G]`, ||H||_F.
        gram: `[N, G, K, K]`, H before the first token.
        rows: rows of `Segments`, or `None`.
    """

    k: Tensor
    log_decay: Tensor | None
    gain: Tensor | None
    norm: Tensor
    gram: Tensor
    rows: Tensor | None


SolveFn = Callable[[Tensor, NormalEquations, Ridge, Solver], Tensor]  # right-hand sides -> x, without gradient


def assemble(
    additive: Memory,
    solve_systems: SolveFn,
    signals: RidgeSignals,
    belief: RidgeBelief,
    segments: Segments | None,
    variance: bool,
    ridge: Ridge,
    solver: Solver,
) -> Filtered:
    """Compute `ridge` for all tokens.

    Args:
        additive: kernel of `additive`.
        solve_systems: function that solves the systems of all tokens, without gradient.
        signals: signals of the tokens.
        belief: prior.
        segments: assignment of tokens to sequences, or `None`.
        variance: whether to return the variance of the read-out.
        ridge: regularisation.
        solver: passed to `solve_systems`.
    """
    q, k, v, log_decay, gain, mix = signals
    dtype, needs_gradient = belief.gram.dtype, needs_grad(q, k, log_decay, gain, belief.gram)
    groups = v.shape[2] // k.shape[2]
    query = q.to(dtype).repeat_interleave(groups, 2)
    key = k.to(dtype)
    value_keys = key.repeat_interleave(groups, 2)

    def apply_gram(x: Tensor) -> tuple[Tensor, Tensor]:
        memory_signals = AdditiveSignals(_alias(x), value_keys, _alias(value_keys), log_decay, gain)
        products, _, final = additive(memory_signals, PointBelief(belief.gram), segments)
        return products, final.mean

    gram_keys, gram = apply_gram(value_keys)
    norm = frobenius_norm(_squared_norms(additive, value_keys, gram_keys, log_decay, gain, belief.gram, segments))
    equations = NormalEquations(key, log_decay, gain, norm, belief.gram, None if segments is None else segments.rows)
    with torch.no_grad():
        x = solve_systems(query, equations, ridge, solver)
    if needs_gradient:
        residual = query - apply_gram(x)[0] - ridge_strength(ridge, norm)[..., None] * x
        constants = (None if y is None else y.detach() for y in equations)
        x = _Correction.apply(residual, x, solve_systems, ridge, solver, *constants)
    reader = x if mix is None else torch.lerp(query, x, mix.to(dtype)[..., None])
    memory_signals = AdditiveSignals(reader, value_keys, v.to(dtype), log_decay, gain)
    mean, _, cross = additive(memory_signals, PointBelief(belief.cross), segments)
    read_variance = (query * x).sum(-1, keepdim=True) if variance else None
    return Filtered(mean.to(v.dtype), read_variance, RidgeBelief(cross.mean, gram))


def _squared_norms(
    additive: Memory,
    key: Tensor,
    gram_keys: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    gram: Tensor,
    segments: Segments | None,
) -> Tensor:
    """Return ||H||_F^2 of every token, `[B, T, G]`, given H k.

    It decays twice as fast as H, and a token adds 2 g k'H k - g^2 |k|^4 (with H after the token).
    """
    weights = 1.0 if gain is None else gain.to(key.dtype)
    increment = 2 * weights * (key * gram_keys).sum(-1) - (weights * key.square().sum(-1)).square()
    ones, decay = key.new_ones(()).expand(*key.shape[:3], 1), None
    if log_decay is not None:
        log_decay = log_decay.to(key.dtype)
        decay = log_decay + log_decay.clamp(min=-1e3)  # twice a finite log-decay may be infinite
    prior = PointBelief(gram.square().sum((-2, -1), keepdim=True))
    memory_signals = AdditiveSignals(ones, _alias(ones), increment[..., None], decay, None)
    return additive(memory_signals, prior, segments).mean[..., 0]


def _alias(x: Tensor) -> Tensor:
    """Return a view of `x`. `torch.compile` requires distinct tensors as arguments of one call."""
    return x.view_as(x)


class _Correction(torch.autograd.Function):
    """Identity of x in the forward pass, with the gradient of x + S^{-1} residual."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        x: Tensor,
        solve_systems: SolveFn,
        ridge: Ridge,
        solver: Solver,
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.solve_systems, ctx.ridge, ctx.solver = solve_systems, ridge, solver
        ctx.save_for_backward(*inputs)
        return x.clone()

    @staticmethod
    @once_differentiable("kernel 'chunked' of `ridge`")
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors  # gradient checkpointing allows only one access
        return ctx.solve_systems(grad_x, NormalEquations(*saved), ctx.ridge, ctx.solver), *[None] * (4 + len(saved))
