"""Kernels "triton" and "cuda" of `dense` as custom ops. Triton is imported at the first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense.block_sizes import CHUNK, may_split_time
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._linear_memory.custom_op import precompile_key, stored_shapes, tile_size
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_launch_cache
from kalmix.ops._shared.token_blocks import num_blocks
from kalmix.ops._shared.widths import padded_width
from kalmix.segments import Segments, segments_without_checks
from kalmix.types import Filtered


def dense(
    signals: DenseSignals, belief: DenseBelief, segments: Segments | None, variance: bool, cuda: bool = False
) -> Filtered:
    """Compute `kalmix.ops.dense` on a GPU.

    Gains depend on the covariance only. They are computed first, then the mean by `delta` with these gains. Rotations
    are removed by a change of coordinates (`triton/rotation.py`).

    Gradients are exact. Training stores a covariance every 64 tokens, the gains, and the intermediates of `delta`.
    float16 is computed in float32. Where values are not checked, NaN in a token affects earlier tokens of its tile (of
    at most 64 tokens), but no other sequence.

    Args:
        signals: signals of the tokens.
        belief: prior.
        segments: assignment of tokens to sequences, or `None`.
        variance: whether to return the variance of the read-out.
        cuda: run the sequential kernels in CUDA C++ instead of Triton.
    """
    q, k, v, *others = signals
    dtype, rows = v.dtype, None if segments is None else segments.rows
    if dtype == torch.float16:  # its range does not hold the gains of nearly certain memories
        q, k, v = q.float(), k.float(), v.float()
    tensors = (q, k, v, *others, *belief)
    mean, variances, *final = _filter(*tensors, rows, variance, needs_grad(*tensors), cuda)[:4]
    return Filtered(mean.to(dtype), variances if variance else None, DenseBelief(*final))


def _saved_shapes(
    k: Tensor, v: Tensor, angle: Tensor | None, rows: Tensor | None, save: bool, sequences: int
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the saved tensors; those of chunks and tiles are flattened: see `tokens_per_block`.

    They are gains, gains in the dtype of k (empty if that is float32), innovation variances and covariances; of
    `delta`, memories at the entry of tiles, errors and inverses; and of rotations, angles at the start of chunks, total
    angles, and the final mean and covariance in rotating coordinates.
    """
    (batch, length, heads, values), width = v.shape, k.shape[3]
    if not save:
        return ((0,),) * 11
    num_chunks = batch * num_blocks(length, CHUNK)
    total_chunks = num_chunks if rows is None else batch * length // CHUNK + rows.shape[0]
    gains = (batch, length, heads, width)
    rounded_gain = (0,) if k.dtype == torch.float32 else gains
    rotation: tuple[tuple[int, ...], ...] = ((0,),) * 4
    if angle is not None:
        memories = sequences, heads, width
        rotation = (
            (total_chunks * heads * (width // 2),),
            (sequences, heads, width // 2),
            (*memories, values),
            (*memories, width),
        )
    return (
        gains,
        rounded_gain,
        gains[:3],
        (total_chunks * heads * padded_width(width) ** 2,),
        *stored_shapes(k, v, rows, True, True),
        *rotation,
    )


def _forward_fake(q, k, v, obs_noise, process_noise, log_decay, angle, mean, covariance, rows, variance, save, cuda):
    exact, double = torch.float32, torch.float64
    dtypes = exact, k.dtype, exact, exact, v.dtype, v.dtype, v.dtype, double, double, exact, exact
    variances = k.new_empty((*v.shape[:3], 1) if variance else (0,), dtype=exact)
    final = mean.new_empty(mean.shape), k.new_empty(covariance.shape, dtype=exact)
    pairs = zip(_saved_shapes(k, v, angle, rows, save, mean.shape[0]), dtypes, strict=True)
    return v.new_empty(v.shape), variances, *final, *(k.new_empty(shape, dtype=dtype) for shape, dtype in pairs)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    angle: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    rows: Tensor | None,
    variance: bool,
    save: bool,
    cuda: bool,
) -> tuple[
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
]:
    from kalmix.ops._dense.triton.forward import forward
    from kalmix.ops._dense.triton.rotated_belief import interleave, turn_belief
    from kalmix.ops._dense.triton.rotation import pair_decays, rotate_signals, sum_angles

    segments = None if rows is None else segments_without_checks(rows)
    shapes = _saved_shapes(k, v, angle, rows, save, mean.shape[0])
    saved_cov = torch.empty(shapes[3], dtype=torch.float32, device=k.device)
    chunk_angles, total_angle = (k.new_empty(0, dtype=torch.float64) for _ in range(2))
    noise_axis = None
    if angle is not None:
        chunk_angles, total_angle = sum_angles(angle, segments)
        q, k, noise_axis = rotate_signals(q, k, angle, chunk_angles, segments)
        log_decay, mean, covariance = pair_decays(log_decay, angle), interleave(mean, (-2,)), interleave(covariance)
    signals = (q, k, v, obs_noise, process_noise, log_decay, noise_axis)
    size = tile_size(v, rows)
    variances, final_mean, final_covariance, gains, results = forward(
        *signals, mean, covariance, segments, variance, size, saved_cov, cuda
    )
    rotation = (chunk_angles, total_angle, final_mean, final_covariance)
    if angle is not None:
        final_mean, final_covariance = turn_belief(final_mean, final_covariance, total_angle)
    pairs = zip((*gains, *results[1:4], *rotation), shapes, strict=True)
    gain, rounded_gain, innovation_var, saved_cov, *others = (
        x if x.shape == shape else x.new_empty(shape) for x, shape in pairs
    )
    states, errors, inverses, chunk_angles, total_angle, rotated_mean, rotated_cov = others
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
        chunk_angles,
        total_angle,
        rotated_mean,
        rotated_cov,
    )


def _precompile_key(k: Tensor, v: Tensor, rows: Tensor | None) -> tuple[Any, ...]:
    """Return the numbers that options of kernels depend on, besides dtypes, widths and strides."""
    return *precompile_key(k, v, rows), may_split_time(*v.shape[:3], packed=rows is not None)


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
    angle: Tensor | None,
    gain: Tensor,
    rounded_gain: Tensor,
    innovation_var: Tensor,
    covariances: Tensor,
    states: Tensor,
    errors: Tensor,
    inverses: Tensor,
    chunk_angles: Tensor,
    total_angle: Tensor,
    rotated_mean: Tensor,
    rotated_cov: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_variance: Tensor | None,
    grad_final_mean: Tensor,
    grad_final_covariance: Tensor,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._dense.triton.backward import backward
    from kalmix.ops._dense.triton.forward import SavedGains
    from kalmix.ops._dense.triton.rotated_belief import allocate_torques, separate, turn_belief_backward
    from kalmix.ops._dense.triton.rotation import (
        pair_decays,
        pair_decays_backward,
        rotate_signals,
        rotate_signals_backward,
    )
    from kalmix.ops._linear_memory.triton.forward import ForwardResults

    segments, size = None if rows is None else segments_without_checks(rows), tile_size(v, rows)
    saved = SavedGains(gain, rounded_gain if rounded_gain.numel() else gain, innovation_var, covariances)
    results = ForwardResults(grad_mean, states, errors, inverses, v.new_empty(0), v.new_empty(0))
    noises = obs_noise, process_noise
    if angle is None:
        signals, grads = (q, k, v, *noises, log_decay, None), (grad_mean, grad_variance, grad_final_mean)
        return backward(*signals, saved, results, segments, size, *grads, grad_final_covariance, None, cuda)
    rotated_q, rotated_k, noise_axis = rotate_signals(q, k, angle, chunk_angles, segments)
    grad_final_mean, grad_final_covariance, grad_total = turn_belief_backward(
        grad_final_mean, grad_final_covariance, rotated_mean, rotated_cov, total_angle
    )
    signals = (rotated_q, rotated_k, v, *noises, pair_decays(log_decay, angle), noise_axis)
    torques = allocate_torques(grad_total, angle, segments)
    grads = (grad_mean, grad_variance, grad_final_mean, grad_final_covariance, torques)
    dq, dk, dv, *noise_grads, grad_decay, grad_axis, grad_prior_mean, grad_prior_cov = backward(
        *signals, saved, results, segments, size, *grads, cuda
    )
    dq, dk, grad_angle = rotate_signals_backward(q, k, angle, chunk_angles, segments, (dq, dk, grad_axis), torques)
    return (
        dq,
        dk,
        dv,
        noise_grads[0],
        noise_grads[1],
        pair_decays_backward(grad_decay, log_decay),
        grad_angle,
        separate(grad_prior_mean, (-2,)),
        separate(grad_prior_cov),
    )


_filter = register_filter_op(
    "kalmix::dense_triton",
    with_launch_cache(_forward, _dry_run, _precompile_key),
    _forward_fake,
    with_launch_cache(_backward),
    outputs=4,
    kernel="kernels 'triton' and 'cuda' of `dense`",
)
