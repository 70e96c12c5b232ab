"""The Triton and CUDA rows of `dense`: custom ops around the kernels, which are imported when they first run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense.block_sizes import WINDOW, padded
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._linear_memory.custom_op import kept_shapes, tile_size
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_launch_cache, with_precompilation
from kalmix.segments import Segments, segments_without_checks
from kalmix.types import Filtered


def dense(
    signals: DenseSignals, belief: DenseBelief, segments: Segments | None, variance: bool, cuda: bool = False
) -> Filtered:
    """See `kalmix.ops.dense`. The gains, which depend on the covariance alone, and then `delta` with them.

    Exact gradients, for which it keeps a covariance every 64 tokens, the gains, and what `delta` keeps. Tokens of a
    tile are multiplied together: where values are not checked, NaN in a token reaches earlier tokens of its tile (at
    most 64), but no other sequence. float16 is computed in float32. With `cuda` the steps through time are CUDA C++,
    else Triton.
    """
    q, k, v, obs_noise, process_noise, log_decay, _ = signals  # none turns
    dtype = v.dtype
    if dtype == torch.float16:  # its range does not hold the gains of nearly certain memories
        q, k, v = q.float(), k.float(), v.float()
    tensors = (q, k, v, obs_noise, process_noise, log_decay, *belief)
    rows = None if segments is None else segments.rows
    mean, read, *last = _filter(*tensors, rows, variance, needs_grad(*tensors), cuda)[:4]
    return Filtered(mean.to(dtype), read if variance else None, DenseBelief(*last))


def _kept_shapes(k: Tensor, v: Tensor, rows: Tensor | None, keep: bool) -> tuple[tuple[int, ...], ...]:
    """Of gains, gains rounded to the dtype of k (if that is another), innovation variances, covariances; of memories
    at tile entries, errors and inverses."""
    (batch, length, heads, _), width = v.shape, k.shape[3]
    if not keep:
        return ((0,),) * 7
    whole = batch * ((length + WINDOW - 1) // WINDOW)
    count = whole if rows is None else batch * length // WINDOW + rows.shape[0]
    gains = (batch, length, heads, width)
    rounded = (0,) if k.dtype == torch.float32 else gains
    return gains, rounded, gains[:3], (count, heads, padded(width), padded(width)), *kept_shapes(k, v, rows, True, True)


def _forward_fake(q, k, v, obs_noise, process_noise, log_decay, mean, covariance, rows, variance, keep, cuda):
    exact = torch.float32
    dtypes = exact, k.dtype, exact, exact, v.dtype, v.dtype, v.dtype
    read = k.new_empty((*v.shape[:3], 1) if variance else (0,), dtype=exact)
    last = mean.new_empty(mean.shape), k.new_empty(covariance.shape, dtype=exact)
    pairs = zip(_kept_shapes(k, v, rows, keep), dtypes, strict=True)
    return v.new_empty(v.shape), read, *last, *(k.new_empty(shape, dtype=dtype) for shape, dtype in pairs)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    rows: Tensor | None,
    variance: bool,
    keep: bool,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._dense.triton.forward import forward

    segments, shapes = None if rows is None else segments_without_checks(rows), _kept_shapes(k, v, rows, keep)
    kept = torch.empty(shapes[3], dtype=torch.float32, device=k.device)
    signals = (q, k, v, obs_noise, process_noise, log_decay)
    size = tile_size(v.shape[1], v.dtype)
    read, after, last, found, results = forward(*signals, mean, covariance, segments, variance, size, kept, cuda)
    pairs = zip((*found, *results[1:]), shapes, strict=True)
    gain, rounded, scale, kept, *of_mean = (x if x.shape == shape else x.new_empty(shape) for x, shape in pairs)
    states, errors, inverses = of_mean
    return results.mean, read, after, last, gain, rounded, scale, kept, states, errors, inverses


def _dry_run(*inputs):
    """Run the forward and the backward pass, to precompile their kernels; the final belief gets no gradient."""
    *signals, _, _, rows, variance, keep, cuda = inputs
    mean, read, after, last, *kept = _forward(*inputs)
    nothing = after.new_zeros(()).expand(after.shape)
    follow: tuple[Any, ...] = (*signals, *kept, rows, mean, read if variance else None, nothing, last, cuda)
    if keep:
        _backward(*follow)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    gain: Tensor,
    rounded: Tensor,
    scale: Tensor,
    covariances: Tensor,
    states: Tensor,
    errors: Tensor,
    inverses: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_read: Tensor | None,
    grad_after: Tensor,
    grad_last: Tensor,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._dense.triton.backward import backward
    from kalmix.ops._dense.triton.forward import Kept
    from kalmix.ops._linear_memory.triton.forward import Results

    segments, size = None if rows is None else segments_without_checks(rows), tile_size(v.shape[1], v.dtype)
    found = Kept(gain, rounded if rounded.numel() else gain, scale, covariances)
    grads = (grad_mean, grad_read, grad_after, grad_last)
    signals, results = (q, k, v, obs_noise, process_noise, log_decay), Results(grad_mean, states, errors, inverses)
    return backward(*signals, found, results, segments, size, *grads, cuda)


_filter = register_filter_op(
    "kalmix::dense_triton",
    with_precompilation(_dry_run, with_launch_cache(_forward)),
    _forward_fake,
    with_launch_cache(_backward),
    outputs=4,
    kernel="kernels 'triton' and 'cuda' of `dense`",
)
