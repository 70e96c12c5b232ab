"""A ridge regression from two parts: a memory that adds, and solutions of its normal equations.

H is a memory whose values are its keys, and so is all that is asked of it: its norm, its products, the read-out.
Gradients through the solution follow from one step of correction that changes nothing forwards,

    x + S^{-1} (q - H x - ridge x),

whose derivative is that of the exact solution (Lemma 2): its own is one more solve, those of H x and of the ridge are
the memory's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief, RidgeBelief
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._ridge.linear_solvers import norm_of, ridge_of
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Ridge, Solver
from kalmix.ops._shared.custom_op import needs_grad, once_differentiable
from kalmix.segments import Segments
from kalmix.types import Filtered

Memory = Callable[..., Filtered]  # `additive`, as its kernels have it


class NormalEquations(NamedTuple):
    """The systems of all tokens, (H + ridge I) x = q, by what H is made of.

    Attributes:
        k: `[B, T, H, K]`.
        log_decay, gain: `[B, T, G]` or `None`.
        norm: `[B, T, G]`, ||H||_F.
        gram: `[N, G, K, K]`, H before the first token.
        rows: of `Segments`.
    """

    k: Tensor
    log_decay: Tensor | None
    gain: Tensor | None
    norm: Tensor
    gram: Tensor
    rows: Tensor | None


Solutions = Callable[[Tensor, NormalEquations, Ridge, Solver], Tensor]  # right sides -> x, no gradient


def assemble(
    additive: Memory,
    solutions: Solutions,
    signals: RidgeSignals,
    belief: RidgeBelief,
    segments: Segments | None,
    variance: bool,
    ridge: Ridge,
    solver: Solver,
) -> Filtered:
    """`ridge` as its kernels have it, given a kernel of `additive` and one that solves."""
    q, k, v, log_decay, gain, mix = signals
    dtype, trains = belief.gram.dtype, needs_grad(q, k, log_decay, gain, belief.gram)
    groups = v.shape[2] // k.shape[2]
    query = q.to(dtype).repeat_interleave(groups, 2)
    key = k.to(dtype)
    own = key.repeat_interleave(groups, 2)  # keys as values

    def gram_times(x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = AdditiveSignals(_another(x), own, _another(own), log_decay, gain)
        read, _, after = additive(tokens, PointBelief(belief.gram), segments)
        return read, after.mean

    image, gram = gram_times(own)
    norm = norm_of(_squares(additive, own, image, log_decay, gain, belief.gram, segments))
    equations = NormalEquations(key, log_decay, gain, norm, belief.gram, None if segments is None else segments.rows)
    with torch.no_grad():
        x = solutions(query, equations, ridge, solver)
    if trains:
        left = query - gram_times(x)[0] - ridge_of(ridge, norm)[..., None] * x
        detached = (None if y is None else y.detach() for y in equations)
        x = _Correction.apply(left, x, solutions, ridge, solver, *detached)
    mixed = x if mix is None else torch.lerp(query, x, mix.to(dtype)[..., None])
    tokens = AdditiveSignals(mixed, own, v.to(dtype), log_decay, gain)
    mean, _, cross = additive(tokens, PointBelief(belief.cross), segments)
    spread = (query * x).sum(-1, keepdim=True) if variance else None
    return Filtered(mean.to(v.dtype), spread, RidgeBelief(cross.mean, gram))


def _squares(
    additive: Memory,
    key: Tensor,
    image: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    gram: Tensor,
    segments: Segments | None,
) -> Tensor:
    """||H||_F^2 of every token `[B, T, G]`, given H k: it decays twice as fast as H and gains 2 g k'H k - g^2 |k|^4."""
    weight = 1.0 if gain is None else gain.to(key.dtype)
    gained = 2 * weight * (key * image).sum(-1) - (weight * key.square().sum(-1)).square()
    one, decay = key.new_ones(()).expand(*key.shape[:3], 1), None if log_decay is None else 2 * log_decay
    prior = PointBelief(gram.square().sum((-2, -1), keepdim=True))
    tokens = AdditiveSignals(one, _another(one), gained[..., None], decay, None)
    return additive(tokens, prior, segments).mean[..., 0]


def _another(x: Tensor) -> Tensor:
    """The same: a compiler wants the tensors of one call to be different ones."""
    return x.view_as(x)


class _Correction(torch.autograd.Function):
    """x as it is, with the gradient of x + S^{-1} left."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, x: Tensor, solutions: Solutions, ridge: Ridge, solver: Solver, *given: Tensor | None
    ) -> Tensor:
        ctx.solutions, ctx.ridge, ctx.solver = solutions, ridge, solver
        ctx.save_for_backward(*given)
        return x.clone()

    @staticmethod
    @once_differentiable("kernel 'chunked' of `ridge`")
    def backward(ctx: Any, to_x: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = ctx.saved_tensors  # gradient checkpointing lets them be read only once
        return ctx.solutions(to_x, NormalEquations(*given), ctx.ridge, ctx.solver), *[None] * (4 + len(given))
