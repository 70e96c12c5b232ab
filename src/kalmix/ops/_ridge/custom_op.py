"""The Triton row of `ridge`: custom ops around the kernels, which are imported when they first run."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import RidgeBelief
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev, ConjugateGradient, Ridge, Solver
from kalmix.ops._ridge.tiles import tile_size
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_precompilation
from kalmix.segments import Segments
from kalmix.types import Filtered


def ridge(
    signals: RidgeSignals, belief: RidgeBelief, segments: Segments | None, variance: bool, ridge: Ridge, solver: Solver
) -> Filtered:
    """See `kalmix.ops.ridge`. Implicit gradients, for which it keeps the solutions, and H and U every 64 tokens."""
    assert isinstance(solver, Chebyshev | ConjugateGradient)
    q, k, v, log_decay, gain, mix = signals
    dtype = v.dtype
    if dtype == torch.float16:  # whose range 1 / ||H|| leaves
        q, k, v = (x.float() for x in (q, k, v))
    level = ridge.factor if isinstance(ridge, Adaptive) else ridge.value
    rows = None if segments is None else segments.rows
    conjugate = isinstance(solver, ConjugateGradient)
    inputs = (q, k, v, log_decay, gain, mix, *belief)
    options = (rows, isinstance(ridge, Adaptive), float(level), conjugate, solver.iterations, needs_grad(*inputs))
    mean, read, cross, gram, *_ = _filter(*inputs, *options)
    return Filtered(mean.to(dtype), read if variance else None, RidgeBelief(cross, gram))


def _kept_shapes(k: Tensor, v: Tensor, rows: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """Of solutions, norms, and H and U at the entry of every tile."""
    (batch, length, _, width), (heads, values) = k.shape, v.shape[2:]
    size = tile_size(length, width, k.dtype)
    tiles = batch * ((length + size - 1) // size) if rows is None else batch * length // size + rows.shape[0]
    tokens, states = (batch, length, heads), (tiles, heads, width)
    return (*tokens, width), (tiles, heads, size), (*states, width), (*states, values)


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
    level: float,
    conjugate: bool,
    iterations: int,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._ridge.triton.forward import forward

    inputs = (q, k, v, log_decay, gain, mix, cross, gram, rows, adaptive, level, conjugate, iterations)
    return forward(*inputs, tile_size(k.shape[1], k.shape[3], k.dtype))


def _dry_run(q, k, v, log_decay, gain, mix, cross, gram, rows, adaptive, level, conjugate, iterations, trains):
    """Run the forward and the backward pass, to precompile their kernels."""
    from kalmix.ops._ridge.triton.backward import backward
    from kalmix.ops._ridge.triton.forward import forward

    signals, size = (q, k, v, log_decay, gain, mix), tile_size(k.shape[1], k.shape[3], k.dtype)
    options = (adaptive, level, conjugate, iterations, size)
    found = forward(*signals, cross, gram, rows, *options)
    if trains:
        none = found[2].new_zeros(())
        given = (found[0], None, none.expand(cross.shape), none.expand(gram.shape))
        backward(*signals, *found[4:], rows, *given, *options)


def _forward_fake(q, k, v, log_decay, gain, mix, cross, gram, rows, *options):
    single = {"dtype": torch.float32, "device": k.device}
    solution, norms, grams, crosses = _kept_shapes(k, v, rows)
    last = (torch.empty(x.shape, **single) for x in (cross, gram))
    kept = k.new_empty(solution), torch.empty(norms, **single), k.new_empty(grams), k.new_empty(crosses)
    return v.new_empty(v.shape), torch.empty(*v.shape[:3], 1, **single), *last, *kept


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
    to_mean: Tensor,
    to_read: Tensor | None,
    to_cross: Tensor,
    to_gram: Tensor,
    adaptive: bool,
    level: float,
    conjugate: bool,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._ridge.triton.backward import backward

    kept, given = (solution, norms, grams, crosses), (to_mean, to_read, to_cross, to_gram)
    size = tile_size(k.shape[1], k.shape[3], k.dtype)
    with torch.cuda.device_of(k):
        options = (adaptive, level, conjugate, iterations)
        return backward(q, k, v, log_decay, gain, mix, *kept, rows, *given, *options, size)


_filter = register_filter_op(
    "kalmix::ridge_triton",
    with_precompilation(_dry_run, _forward),
    _forward_fake,
    _backward,
    outputs=4,
    kernel="kernel 'triton' of `ridge`",
)
