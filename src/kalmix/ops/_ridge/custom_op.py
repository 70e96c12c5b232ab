"""Kernel "triton" of `ridge` as custom ops. Triton is imported at the first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.beliefs import RidgeBelief
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev, ConjugateGradient, Ridge, Solver
from kalmix.ops._ridge.tiles import scan_columns, tile_size
from kalmix.ops._shared.constants import zeros
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_launch_cache
from kalmix.ops._shared.token_blocks import num_blocks
from kalmix.ops._shared.widths import padded_width
from kalmix.segments import Segments
from kalmix.types import Filtered


def ridge(
    signals: RidgeSignals,
    belief: RidgeBelief,
    segments: Segments | None,
    variance: bool,
    ridge: Ridge,
    solver: Solver,
    no_prior: bool = False,
) -> Filtered:
    """Compute `kalmix.ops.ridge` with Triton. Training stores the solutions, and H and U at the entry of every tile.

    If `no_prior`, the prior is 0. Packed sequences then neither read it nor write its gradient, and store nothing at
    the entry of their first tile.
    """
    assert isinstance(solver, Chebyshev | ConjugateGradient)
    q, k, v, log_decay, gain, mix = signals
    dtype = v.dtype
    if dtype == torch.float16:  # 1 / ||H|| exceeds its range
        q, k, v = (x.float() for x in (q, k, v))
    ridge_parameter = ridge.factor if isinstance(ridge, Adaptive) else ridge.value
    rows = None if segments is None else segments.rows
    conjugate = isinstance(solver, ConjugateGradient)
    inputs = (q, k, v, log_decay, gain, mix, *belief)
    options = (
        rows,
        isinstance(ridge, Adaptive),
        float(ridge_parameter),
        conjugate,
        solver.iterations,
        needs_grad(*inputs),
        no_prior and rows is not None,
    )
    mean, variances, cross, gram, *_ = _filter(*inputs, *options)
    return Filtered(mean.to(dtype), variances if variance else None, RidgeBelief(cross, gram))


def _saved_shapes(k: Tensor, v: Tensor, rows: Tensor | None, no_prior: bool) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of solutions, norms, and H and U at the entry of every tile; the last three are flattened."""
    (batch, length, _, width), (heads, values) = k.shape, v.shape[2:]
    size = tile_size(k, rows)
    tiles = batch * num_blocks(length, size) if rows is None else batch * length // size + rows.shape[0]
    states = (batch * length // size + 1 if no_prior else tiles) * heads  # see `num_boundaries` of `_linear_memory`
    return (batch, length, heads, width), (tiles * heads * size,), (states * width * width,), (states * width * values,)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    cross: Tensor,
    gram: Tensor,
    rows: Tensor | None,
    adaptive: bool,
    ridge_parameter: float,
    conjugate: bool,
    iterations: int,
    needs_gradient: bool,
    no_prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._ridge.triton.forward import forward

    inputs = (q, k, v, log_decay, gain, mix, cross, gram, rows, adaptive, ridge_parameter, conjugate, iterations)
    return forward(*inputs, tile_size(k, rows), no_prior)


def _dry_run(*inputs):
    """Run the forward and the backward pass, to precompile their kernels."""
    *signals, _, _, rows, adaptive, ridge_parameter, conjugate, iterations, needs_gradient, no_prior = inputs
    mean, _variance, _cross, _gram, *saved = _forward(*inputs)
    grads, options = (mean, None, None, None), (adaptive, ridge_parameter, conjugate, iterations, no_prior)
    arguments: tuple[Any, ...] = (*signals, *saved, rows, *grads, *options)
    if needs_gradient:
        _backward(*arguments)


def _precompile_key(k: Tensor, v: Tensor, rows: Tensor | None) -> tuple[int, int]:
    """Return the numbers that options of kernels depend on, besides dtypes, widths and strides."""
    sequences = v.shape[0] if rows is None else rows.shape[0]
    return tile_size(k, rows), scan_columns(sequences, v.shape[2], padded_width(k.shape[3]))


def _forward_fake(q, k, v, log_decay, gain, mix, cross, gram, rows, *options):
    float32_kwargs, no_prior = {"dtype": torch.float32, "device": k.device}, options[-1]
    solution, norms, grams, crosses = _saved_shapes(k, v, rows, no_prior)
    final = (torch.empty(x.shape, **float32_kwargs) for x in (cross, gram))
    saved = k.new_empty(solution), torch.empty(norms, **float32_kwargs), k.new_empty(grams), k.new_empty(crosses)
    return v.new_empty(v.shape), torch.empty(*v.shape[:3], 1, **float32_kwargs), *final, *saved


def _backward_fake(*inputs):
    signals, (k, v), rows, no_prior = inputs[:6], inputs[1:3], inputs[10], inputs[-1]
    memories = v.shape[0] if rows is None else rows.shape[0], v.shape[2], k.shape[3]
    grads = (v.new_empty(0) if x is None else x.new_empty(x.shape) for x in signals)
    priors = (v.new_empty((0,) if no_prior else (*memories, x), dtype=torch.float32) for x in (v.shape[3], k.shape[3]))
    return *grads, *priors


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    solution: Tensor,
    norms: Tensor,
    grams: Tensor,
    crosses: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_variance: Tensor | None,
    grad_cross: Tensor | None,
    grad_gram: Tensor | None,
    adaptive: bool,
    ridge_parameter: float,
    conjugate: bool,
    iterations: int,
    no_prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._ridge.triton.backward import backward

    if rows is None or grad_cross is not None or grad_gram is not None:
        memories = v.shape[0] if rows is None else rows.shape[0], v.shape[2], k.shape[3]
        grad_cross, grad_gram = (
            zeros((*memories, columns), v.device) if x is None else x
            for x, columns in ((grad_cross, v.shape[3]), (grad_gram, k.shape[3]))
        )
    saved, grads = (solution, norms, grams, crosses), (grad_mean, grad_variance, grad_cross, grad_gram)
    options = (adaptive, ridge_parameter, conjugate, iterations, tile_size(k, rows), no_prior)
    return backward(q, k, v, log_decay, gain, mix, *saved, rows, *grads, *options)


_filter = register_filter_op(
    "kalmix::ridge_triton",
    with_launch_cache(_forward, _dry_run, _precompile_key),
    _forward_fake,
    with_launch_cache(_backward),
    outputs=4,
    kernel="kernel 'triton' of `ridge`",
    backward_fake=_backward_fake,
)
