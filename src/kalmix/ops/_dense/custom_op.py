"""Kernels "triton" and "cuda" of `dense` as custom ops. Triton is imported at the first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense.block_sizes import CHUNK, padded_width
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._linear_memory.custom_op import stored_shapes, tile_size
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_launch_cache
from kalmix.segments import Segments, segments_without_checks
from kalmix.types import Filtered


def dense(
    signals: DenseSignals, belief: DenseBelief, segments: Segments | None, variance: bool, cuda: bool = False
) -> Filtered:
    """Compute `kalmix.ops.dense` on a GPU.

    Gains depend on the covariance only. They are computed first, then the mean by `delta` with these gains.

    Gradients are exact. Training stores a covariance every 64 tokens, the gains, and the intermediates of `delta`.
    float16 is computed in float32. Where values are not checked, NaN in a token affects earlier tokens of its tile (of
    at most 64 tokens), but no other sequence.

    Args:
        signals: signals of the tokens, without angles.
        belief: prior.
        segments: assignment of tokens to sequences, or `None`.
        variance: whether to return the variance of the read-out.
        cuda: run the sequential kernels in CUDA C++ instead of Triton.
    """
    q, k, v, obs_noise, process_noise, log_decay, _ = signals  # there is no angle
    dtype = v.dtype
    if dtype == torch.float16:  # its range does not hold the gains of nearly certain memories
        q, k, v = q.float(), k.float(), v.float()
    tensors = (q, k, v, obs_noise, process_noise, log_decay, *belief)
    rows = None if segments is None else segments.rows
    mean, variances, *final = _filter(*tensors, rows, variance, needs_grad(*tensors), cuda)[:4]
    return Filtered(mean.to(dtype), variances if variance else None, DenseBelief(*final))


def _saved_shapes(k: Tensor, v: Tensor, rows: Tensor | None, save: bool) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the saved tensors; those of chunks and tiles are flattened: see `tokens_per_block`.

    They are gains, gains in the dtype of k (empty if that is float32), innovation variances and covariances; and of
    `delta`, memories at the entry of tiles, errors and inverses.
    """
    (batch, length, heads, _), width = v.shape, k.shape[3]
    if not save:
        return ((0,),) * 7
    num_chunks = batch * ((length + CHUNK - 1) // CHUNK)
    total_chunks = num_chunks if rows is None else batch * length // CHUNK + rows.shape[0]
    gains = (batch, length, heads, width)
    rounded_gain = (0,) if k.dtype == torch.float32 else gains
    return (
        gains,
        rounded_gain,
        gains[:3],
        (total_chunks * heads * padded_width(width) ** 2,),
        *stored_shapes(k, v, rows, True, True),
    )


def _forward_fake(q, k, v, obs_noise, process_noise, log_decay, mean, covariance, rows, variance, save, cuda):
    exact = torch.float32
    dtypes = exact, k.dtype, exact, exact, v.dtype, v.dtype, v.dtype
    variances = k.new_empty((*v.shape[:3], 1) if variance else (0,), dtype=exact)
    final = mean.new_empty(mean.shape), k.new_empty(covariance.shape, dtype=exact)
    pairs = zip(_saved_shapes(k, v, rows, save), dtypes, strict=True)
    return v.new_empty(v.shape), variances, *final, *(k.new_empty(shape, dtype=dtype) for shape, dtype in pairs)


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
    save: bool,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._dense.triton.forward import forward

    segments, shapes = None if rows is None else segments_without_checks(rows), _saved_shapes(k, v, rows, save)
    saved_cov = torch.empty(shapes[3], dtype=torch.float32, device=k.device)
    signals = (q, k, v, obs_noise, process_noise, log_decay)
    size = tile_size(v.shape[1], v.dtype)
    variances, final_mean, final_covariance, gains, results = forward(
        *signals, mean, covariance, segments, variance, size, saved_cov, cuda
    )
    pairs = zip((*gains, *results[1:]), shapes, strict=True)
    gain, rounded_gain, innovation_var, saved_cov, *mean_states = (
        x if x.shape == shape else x.new_empty(shape) for x, shape in pairs
    )
    states, errors, inverses = mean_states
    return (
        results.mean,
        variances,
        final_mean,
        final_covariance,
        gain,
        rounded_gain,
        innovation_var,
        saved_cov,
        states,
        errors,
        inverses,
    )


def _dry_run(*inputs):
    """Run the forward and the backward pass, to precompile their kernels; the final belief gets no gradient."""
    *signals, _, _, rows, variance, save, cuda = inputs
    mean, variances, final_mean, final_covariance, *saved = _forward(*inputs)
    zero = final_mean.new_zeros(()).expand(final_mean.shape)
    backward_inputs: tuple[Any, ...] = (
        *signals,
        *saved,
        rows,
        mean,
        variances if variance else None,
        zero,
        final_covariance,
        cuda,
    )
    if save:
        _backward(*backward_inputs)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    gain: Tensor,
    rounded_gain: Tensor,
    innovation_var: Tensor,
    covariances: Tensor,
    states: Tensor,
    errors: Tensor,
    inverses: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_variance: Tensor | None,
    grad_final_mean: Tensor,
    grad_final_covariance: Tensor,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._dense.triton.backward import backward
    from kalmix.ops._dense.triton.forward import SavedGains
    from kalmix.ops._linear_memory.triton.forward import ForwardResults

    segments, size = None if rows is None else segments_without_checks(rows), tile_size(v.shape[1], v.dtype)
    saved = SavedGains(gain, rounded_gain if rounded_gain.numel() else gain, innovation_var, covariances)
    grads = (grad_mean, grad_variance, grad_final_mean, grad_final_covariance)
    signals, results = (
        (q, k, v, obs_noise, process_noise, log_decay),
        ForwardResults(grad_mean, states, errors, inverses),
    )
    return backward(*signals, saved, results, segments, size, *grads, cuda)


_filter = register_filter_op(
    "kalmix::dense_triton",
    with_launch_cache(_forward, _dry_run),
    _forward_fake,
    with_launch_cache(_backward),
    outputs=4,
    kernel="kernels 'triton' and 'cuda' of `dense`",
)
