"""The Triton row of `ridge`: custom ops around the kernels, which are imported when they first run."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief, RidgeBelief
from kalmix.kernels.additive import fused as memory
from kalmix.kernels.ridge.tiles import in_two_parts, tile_size
from kalmix.segments import Segments
from kalmix.solvers import Adaptive, Chebyshev, ConjugateGradient, Ridge, Solver
from kalmix.types import Filtered


def ridge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    ridge: Ridge,
    solver: Solver,
    belief: RidgeBelief,
    segments: Segments | None,
    variance: bool,
) -> Filtered:
    """See `kalmix.ops.ridge`. The solutions, which need no values, and then `additive` read along them.

    Implicit gradients, for which it keeps the solutions and an H every tile of at most 64 tokens.
    """
    assert isinstance(solver, Chebyshev | ConjugateGradient)
    dtype = v.dtype
    if dtype == torch.float16:  # whose range 1 / ||H|| leaves
        q, k, v = (x.float() for x in (q, k, v))
    level = ridge.factor if isinstance(ridge, Adaptive) else ridge.value
    rows = None if segments is None else segments.rows
    conjugate = isinstance(solver, ConjugateGradient)
    options = (rows, isinstance(ridge, Adaptive), float(level), conjugate, solver.iterations)
    mixed, read, gram, *_ = _regress(q, k, log_decay, gain, mix, belief.gram, *options)
    own = k if k.shape[2] == v.shape[2] else k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    mean, _, cross = memory.additive(mixed, own, v, log_decay, gain, PointBelief(belief.cross), segments)
    return Filtered(mean.to(dtype), read if variance else None, RidgeBelief(cross.mean, gram))


def _kept_shapes(k: Tensor, prior: Tensor, mixes: bool, rows: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """Of solutions that are not what is read, norms, and H at the entry of every tile, in two parts."""
    (batch, length, _, width), heads = k.shape, prior.shape[1]
    size = tile_size(length, width, k.dtype)
    tiles = batch * ((length + size - 1) // size) if rows is None else batch * length // size + rows.shape[0]
    tokens, states = (batch, length, heads), (tiles, heads, width, width)
    low = states if in_two_parts(width, k.dtype) else (0,)
    return (*tokens, width) if mixes else (0,), tokens, states, low


@torch.library.custom_op("kalmix::ridge_triton", mutates_args=())
def _regress(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    prior: Tensor,
    rows: Tensor | None,
    adaptive: bool,
    level: float,
    conjugate: bool,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.kernels.ridge.triton import forward

    size = tile_size(k.shape[1], k.shape[3], k.dtype)
    with torch.cuda.device_of(k):
        return forward(q, k, log_decay, gain, mix, prior, rows, adaptive, level, conjugate, iterations, size)


@_regress.register_fake
def _(q, k, log_decay, gain, mix, prior, rows, adaptive, level, conjugate, iterations):
    solution, norms, high, low = _kept_shapes(k, prior, mix is not None, rows)
    single = {"dtype": torch.float32, "device": k.device}
    reads = k.new_empty(*norms, k.shape[3]), torch.empty(*norms, 1, **single), torch.empty(prior.shape, **single)
    return *reads, k.new_empty(solution), torch.empty(norms, **single), k.new_empty(high), k.new_empty(low)


@torch.library.custom_op("kalmix::ridge_triton_backward", mutates_args=())
def _gradients(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mix: Tensor | None,
    solution: Tensor,
    norms: Tensor,
    high: Tensor,
    low: Tensor,
    rows: Tensor | None,
    grad_mixed: Tensor,
    grad_read: Tensor | None,
    grad_last: Tensor,
    adaptive: bool,
    level: float,
    conjugate: bool,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.kernels.ridge.triton_backward import backward

    kept, grads = (solution, norms, high, low), (grad_mixed, grad_read, grad_last)
    size = tile_size(k.shape[1], k.shape[3], k.dtype)
    with torch.cuda.device_of(k):
        options = (adaptive, level, conjugate, iterations)
        return backward(q, k, log_decay, gain, mix, *kept, rows, *grads, *options, size)


@_gradients.register_fake
def _(q, k, log_decay, gain, mix, solution, norms, high, low, rows, grad_mixed, grad_read, grad_last, *options):
    given = (k.new_empty(0) if x is None else x for x in (q, k, log_decay, gain, mix))
    return *(x.new_empty(x.shape) for x in given), grad_last.new_empty(grad_last.shape)


def _setup(ctx, inputs, output):
    *signals, prior, rows, adaptive, level, conjugate, iterations = inputs
    mixed, _, _, *kept = output
    ctx.save_for_backward(*signals, mixed if signals[4] is None else kept[0], *kept[1:], rows)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.prior, ctx.options = prior.shape, (adaptive, level, conjugate, iterations)


def _backward(ctx, grad_mixed, grad_read, grad_last, *_):
    *signals, solution, norms, high, low, rows = ctx.saved_tensors
    grad_mixed = solution.new_zeros(()).expand(solution.shape) if grad_mixed is None else grad_mixed
    grad_last = norms.new_zeros(()).expand(ctx.prior) if grad_last is None else grad_last
    kept = (solution, norms, high, low)
    grads = _gradients(*signals, *kept, rows, grad_mixed, grad_read, grad_last, *ctx.options)
    given = (None if x is None else grad for x, grad in zip(signals, grads, strict=False))
    return *given, grads[5], None, None, None, None, None


_regress.register_autograd(_backward, setup_context=_setup)
