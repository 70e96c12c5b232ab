"""Kernel "triton" of `ridge` as custom ops. Triton is imported at the first call."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import RidgeBelief
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev, ConjugateGradient, Ridge, Solver
from kalmix.ops._ridge.tiles import tile_size
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_launch_cache
from kalmix.ops._shared.token_blocks import num_blocks
from kalmix.segments import Segments
from kalmix.types import Filtered


def ridge(
    signals: RidgeSignals, belief: RidgeBelief, segments: Segments | None, variance: bool, ridge: Ridge, solver: Solver
) -> Filtered:
    """Compute `kalmix.ops.ridge` with Triton. Training stores the solutions, and H and U at the entry of every tile."""
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
    )
    mean, variances, cross, gram, *_ = _filter(*inputs, *options)
    return Filtered(mean.to(dtype), variances if variance else None, RidgeBelief(cross, gram))


def _saved_shapes(k: Tensor, v: Tensor, rows: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of solutions, norms, and H and U at the entry of every tile; the last three are flattened."""
    (batch, length, _, width), (heads, values) = k.shape, v.shape[2:]
    size = tile_size(k, rows)
    tiles = batch * num_blocks(length, size) if rows is None else batch * length // size + rows.shape[0]
    states = tiles * heads
    return (batch, length, heads, width), (states * size,), (states * width * width,), (states * width * values,)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._ridge.triton.forward import forward

    inputs = (q, k, v, log_decay, gain, mix, cross, gram, rows, adaptive, ridge_parameter, conjugate, iterations)
    return forward(*inputs, tile_size(k, rows))


def _dry_run(
    q, k, v, log_decay, gain, mix, cross, gram, rows, adaptive, ridge_parameter, conjugate, iterations, needs_gradient
):
    """Run the forward and the backward pass, to precompile their kernels."""
    from kalmix.ops._ridge.triton.backward import backward
    from kalmix.ops._ridge.triton.forward import forward

    signals, size = (q, k, v, log_decay, gain, mix), tile_size(k, rows)
    options = (adaptive, ridge_parameter, conjugate, iterations, size)
    outputs = forward(*signals, cross, gram, rows, *options)
    if needs_gradient:
        zero = outputs[2].new_zeros(())
        grads = (outputs[0], None, zero.expand(cross.shape), zero.expand(gram.shape))
        backward(*signals, *outputs[4:], rows, *grads, *options)


def _forward_fake(q, k, v, log_decay, gain, mix, cross, gram, rows, *options):
    float32_kwargs = {"dtype": torch.float32, "device": k.device}
    solution, norms, grams, crosses = _saved_shapes(k, v, rows)
    final = (torch.empty(x.shape, **float32_kwargs) for x in (cross, gram))
    saved = k.new_empty(solution), torch.empty(norms, **float32_kwargs), k.new_empty(grams), k.new_empty(crosses)
    return v.new_empty(v.shape), torch.empty(*v.shape[:3], 1, **float32_kwargs), *final, *saved


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
    grad_cross: Tensor,
    grad_gram: Tensor,
    adaptive: bool,
    ridge_parameter: float,
    conjugate: bool,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._ridge.triton.backward import backward

    saved, grads = (solution, norms, grams, crosses), (grad_mean, grad_variance, grad_cross, grad_gram)
    size = tile_size(k, rows)
    options = (adaptive, ridge_parameter, conjugate, iterations)
    return backward(q, k, v, log_decay, gain, mix, *saved, rows, *grads, *options, size)


_filter = register_filter_op(
    "kalmix::ridge_triton",
    with_launch_cache(_forward, _dry_run),
    _forward_fake,
    with_launch_cache(_backward),
    outputs=4,
    kernel="kernel 'triton' of `ridge`",
)
