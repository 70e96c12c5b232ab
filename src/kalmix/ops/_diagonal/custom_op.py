"""Kernels "cuda" and "triton" of `diagonal` as a custom op; Triton is imported in the first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.scratch import CHUNK, padded_slots
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_launch_cache
from kalmix.ops._shared.token_blocks import num_blocks
from kalmix.segments import Segments, segments_without_checks
from kalmix.types import Filtered


def diagonal(
    signals: DiagonalSignals,
    belief: DiagonalBelief,
    segments: Segments | None,
    variance: bool,
    no_prior: bool = False,
    cuda: bool = False,
) -> Filtered:
    """Compute `kalmix.ops.diagonal` on a GPU. Training stores a belief every 32 tokens and no other state.

    Args:
        signals: signals of the tokens.
        belief: prior.
        segments: assignment of tokens to sequences, or `None`.
        variance: whether to return the variance of the read-out.
        no_prior: whether the prior is the default. With packed sequences, its gradient is not computed then.
        cuda: filter and differentiate the tokens of tiles in CUDA C++ instead of Triton.
    """
    tensors = (*signals, *belief)
    rows = None if segments is None else segments.rows
    options = (variance, needs_grad(*tensors), cuda, no_prior and rows is not None)
    mean, var, final_mean, final_var, _ = _filter(*tensors, rows, *options)
    return Filtered(mean, var if variance else None, DiagonalBelief(final_mean, final_var))


def map_sequences(
    k: Tensor, v: Tensor, precision: Tensor, log_decay: Tensor, process_noise: Tensor, segments: Segments | None
) -> Tensor:
    """Return the fields of the `DiagonalUpdate` of each sequence, `[5, N, G, K, V]` in float32, without gradients.

    This is not a custom op: call it in eager code only, without `torch.compile` or `torch.func`.
    """
    rows = None if segments is None else segments.rows
    with torch.no_grad():
        return _map_sequences(k, v, precision, log_decay, process_noise, rows)


@with_launch_cache
def _map_sequences(
    k: Tensor, v: Tensor, precision: Tensor, log_decay: Tensor, process_noise: Tensor, rows: Tensor | None
) -> Tensor:
    from kalmix.ops._diagonal.triton.sequence_maps import map_sequences

    segments = None if rows is None else segments_without_checks(rows)
    return map_sequences(k, v, precision, log_decay, process_noise, segments)


def _stored_shape(q: Tensor, v: Tensor, rows: Tensor | None, store: bool) -> tuple[int, ...]:
    batch, length, heads, channels = v.shape
    whole = batch * num_blocks(length, CHUNK)
    count = whole if rows is None else batch * length // CHUNK + rows.shape[0]
    return (count * 2 * heads * channels * padded_slots(q.shape[-1]),) if store else (0,)


def _forward_fake(q, k, v, precision, log_decay, process_noise, mean, var, rows, variance, store, cuda, no_prior):
    read_mean = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shapes = (v.shape if variance else (0,), mean.shape, var.shape, _stored_shape(q, v, rows, store))
    return read_mean, *(torch.empty(shape, dtype=torch.float32, device=v.device) for shape in shapes)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    mean: Tensor,
    var: Tensor,
    rows: Tensor | None,
    variance: bool,
    store: bool,
    cuda: bool,
    no_prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._diagonal.triton.forward import forward

    segments = None if rows is None else segments_without_checks(rows)
    stored = torch.empty(_stored_shape(q, v, rows, store), dtype=torch.float32, device=v.device)
    return *forward(q, k, v, precision, log_decay, process_noise, mean, var, segments, variance, stored, cuda), stored


def _precompile_key(q: Tensor, v: Tensor, rows: Tensor | None, cuda: bool) -> tuple[bool, ...]:
    """Return whether sequences have one tile, and whether they need code for the rest of a group of tokens."""
    from kalmix.ops._diagonal.cuda.plan import group_tokens
    from kalmix.ops._diagonal.cuda.plan import tile_size as cuda_tile_size
    from kalmix.ops._diagonal.triton.plan import PREFETCH, forward_tile_size, is_ragged, round_tile_size

    length, slots = v.shape[1], q.shape[3]
    sizes, groups = [forward_tile_size(v, slots)], [PREFETCH]
    if cuda:
        sizes.append(cuda_tile_size(v, slots))
        groups.append(group_tokens(slots))
    return *(length <= round_tile_size(x) for x in sizes), *(is_ragged(length, rows, x) for x in groups)


def _dry_run(*inputs):
    """Run the forward and the backward pass, to precompile their kernels."""
    *signals, _, _, rows, variance, store, cuda, no_prior = inputs
    read_mean, read_var, *final, stored = _forward(*inputs)
    grads = read_mean, read_var if variance else None, *final
    arguments: tuple[Any, ...] = (*signals, stored, rows, *grads, cuda, no_prior)
    if store:
        _backward(*arguments)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    stored: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_var: Tensor | None,
    grad_final_mean: Tensor,
    grad_final_var: Tensor,
    cuda: bool,
    no_prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._diagonal.triton.backward import backward

    segments = None if rows is None else segments_without_checks(rows)
    grads = (grad_mean, grad_var, grad_final_mean, grad_final_var)
    return backward(q, k, v, precision, log_decay, process_noise, stored, segments, *grads, cuda, no_prior)


def _backward_fake(*inputs):
    *signals, _stored, _rows, _grad_mean, _grad_var, grad_final_mean, grad_final_var, _cuda, no_prior = inputs
    priors = (x.new_empty((0,) if no_prior else x.shape) for x in (grad_final_mean, grad_final_var))
    return *(x.new_empty(x.shape) for x in signals), *priors


def _backward_to_prior(*inputs):
    """Return the gradients of the prior alone, given the arguments of `_backward`."""
    from kalmix.ops._diagonal.triton.backward import backward_to_prior

    *signals, stored, rows, grad_mean, grad_var, grad_final_mean, grad_final_var, _cuda, _no_prior = inputs
    segments = None if rows is None else segments_without_checks(rows)
    grads = (grad_mean, grad_var, grad_final_mean, grad_final_var)
    arguments: tuple[Any, ...] = (*signals, stored, segments, *grads)
    return backward_to_prior(*arguments)


_filter = register_filter_op(
    "kalmix::diagonal_triton",
    with_launch_cache(_forward, _dry_run, _precompile_key),
    _forward_fake,
    with_launch_cache(_backward),
    outputs=4,
    kernel="kernels 'cuda' and 'triton' of `diagonal`",
    prior=with_launch_cache(_backward_to_prior),
    backward_fake=_backward_fake,
)
