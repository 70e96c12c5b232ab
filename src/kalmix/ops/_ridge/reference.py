"""Kernel "reference" of `ridge`: one token at a time, with explicit matrices and plain autograd.

It supports every solver, unrolled gradients and derivatives of every order. Training stores O(T K (K + V)) numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import RidgeBelief
from kalmix.ops._ridge.dense_solve import solve_differentiable
from kalmix.ops._ridge.linear_solvers import frobenius_norm, ridge_strength, spectrum_scale
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Ridge, Solver
from kalmix.ops._shared.products import product
from kalmix.ops._shared.step_loop import Readouts, fill_outside, optional_segment_ids, run_steps
from kalmix.segments import Segments
from kalmix.types import Filtered


def ridge(
    signals: RidgeSignals, belief: RidgeBelief, segments: Segments | None, variance: bool, ridge: Ridge, solver: Solver
) -> Filtered:
    """Compute `kalmix.ops.ridge` one token at a time."""
    batch, length, heads, _ = signals.v.shape
    dtype, segment_ids = belief.gram.dtype, optional_segment_ids(segments, batch, length)
    q, k, v, log_decay, gain, mix = fill_outside(segment_ids, *signals)

    def signal(x: Tensor | None, absent: float) -> Tensor:
        return k.new_full(v.shape[:3], absent, dtype=dtype) if x is None else x.to(dtype)

    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    factors = (signal(log_decay, 0.0).exp(), signal(gain, 1.0), signal(mix, 1.0))
    tokens = zip(*(x.unbind(1) for x in (q, k, v.to(dtype), *(x[..., None] for x in factors))), strict=True)

    def step(
        state: RidgeBelief, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, weight: Tensor, token_mix: Tensor
    ) -> tuple[Readouts, RidgeBelief]:
        weighted_key = (weight * key)[..., None]
        cross = decay[..., None] * state.cross + weighted_key * value[..., None, :]
        gram = decay[..., None] * state.gram + weighted_key * key[..., None, :]
        norm = frobenius_norm(gram.square().sum((-2, -1)))[..., None]
        x = solve_differentiable(solver, gram, ridge_strength(ridge, norm), spectrum_scale(ridge, norm), query)
        reader = torch.lerp(query, x, token_mix)
        mean = product(reader[..., None, :], cross)[..., 0, :]
        return (mean, (query * x).sum(-1, keepdim=True)), RidgeBelief(cross, gram)

    outputs, final = run_steps(step, belief, tokens, segment_ids)
    return Filtered(outputs[0].to(v.dtype), outputs[1] if variance else None, final)
