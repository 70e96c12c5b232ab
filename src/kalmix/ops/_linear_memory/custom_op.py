"""Triton kernels of linear memories as a custom op, for `additive` and `delta`; they are imported in the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._linear_memory.scratch import SUBTILE, subtile_signals_size
from kalmix.ops._shared.constants import zeros
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_launch_cache
from kalmix.ops._shared.token_blocks import num_blocks, tokens_per_tile
from kalmix.segments import Segments, segments_without_checks
from kalmix.types import Filtered
from kalmix.validation import FLOAT32_STATE_DTYPES

if TYPE_CHECKING:  # these ops import this module
    from kalmix.ops._additive.signals import AdditiveSignals
    from kalmix.ops._delta.signals import DeltaSignals
    from kalmix.ops._shared.triton.tiles import Tiling

REQUIREMENTS: dict[str, Any] = {  # fields of `Kernel` that the Triton rows of `additive` and `delta` share
    "devices": ("cuda",),
    "dtypes": FLOAT32_STATE_DTYPES,
    "max_key_width": 256,
    "triton": True,
    "low_precision_products": True,
}


def filter_memory(
    signals: AdditiveSignals | DeltaSignals,
    belief: PointBelief,
    segments: Segments | None,
    corrects: bool,
    no_prior: bool = False,
) -> Filtered:
    """Compute `kalmix.ops.delta` if `corrects`, otherwise `kalmix.ops.additive`.

    Training stores a memory every `tile_size` tokens of a sequence (if `no_prior` and packed, none before the first
    token) and, if `corrects`, the prediction errors and an inverse `[tile_size, tile_size]` for each tile. With decays
    per key it also stores the scores, a number per token and position in the tile, and the decays `[K]` of every 16
    tokens; zeros if tiles have 16 tokens. For longer tiles it stores queries, write vectors and, if `corrects`, keys
    with the decays inside 16 tokens.

    Args:
        signals: signals of the tokens.
        belief: prior.
        segments: assignment of tokens to sequences, or `None`.
        corrects: whether to compute `delta`.
        no_prior: whether the prior is 0. Packed sequences then neither read it nor write its gradient.
    """
    tensors = (signals.q, signals.k, signals.v, signals.gain, signals.log_decay, belief.mean)
    rows = None if segments is None else segments.rows
    no_prior = no_prior and segments is not None
    mean, final_mean, *_ = _filter(*tensors, rows, corrects, needs_grad(*tensors), no_prior)
    return Filtered(mean, None, PointBelief(final_mean))


def final_memory(
    signals: AdditiveSignals | DeltaSignals, prior: Tensor, segments: Segments | None, corrects: bool
) -> Tensor:
    """Return the memories `[N, G, K, V]` after the last tokens, without read-outs and without gradients.

    It does not use the queries. This is not a custom op: call it in eager code only, without `torch.func`.
    """
    rows = None if segments is None else segments.rows
    with torch.no_grad():
        return _final_memory(signals.k, signals.v, signals.gain, signals.log_decay, prior, rows, corrects)


def tile_size(v: Tensor, rows: Tensor | None) -> int:
    """Return the tokens per tile for values `[B, T, G, V]`: at most 32 in float32 and 64 in half precision.

    Short sequences have smaller tiles: see `tokens_per_tile`.
    """
    sequences = None if rows is None else rows.shape[0]
    return tokens_per_tile(v.shape[0], v.shape[1], sequences, 32 if v.dtype == torch.float32 else 64)


def precompile_key(k: Tensor, v: Tensor, rows: Tensor | None) -> tuple[int, int]:
    """Return the numbers that options of kernels depend on, besides dtypes, widths and strides."""
    from kalmix.ops._linear_memory.triton.forward import scan_columns

    sequences = v.shape[0] if rows is None else rows.shape[0]
    return tile_size(v, rows), scan_columns(sequences, v, k.shape[3])


def stored_shapes(
    k: Tensor, v: Tensor, rows: Tensor | None, corrects: bool, store: bool, no_prior: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of stored memories, errors and inverses; `(0,)` for those that are not stored.

    Memories are flattened: see `tokens_per_block`. If `no_prior`, they are those at the boundaries between tiles: see
    `triton.forward.num_boundaries`.
    """
    batch, length, heads, width = v.shape
    size = tile_size(v, rows)
    count = batch * num_blocks(length, size) if rows is None else batch * length // size + rows.shape[0]
    if no_prior:
        count = batch * length // size + 1
    states = (count * heads * k.shape[3] * width,) if store else (0,)
    return states, v.shape if store and corrects else (0,), (*v.shape[:3], size) if store and corrects else (0,)


def _decay_shapes(
    k: Tensor, v: Tensor, log_decay: Tensor | None, rows: Tensor | None, corrects: bool, store: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of stored scores, decays of subtiles and signals of subtiles; `(0,)` if they are not stored.

    Decays are flattened: see `tokens_per_block`.
    """
    (batch, length, heads, _), size = v.shape, tile_size(v, rows)
    if not store or log_decay is None or log_decay.ndim != 4:
        return (0,), (0,), (0,)
    count = batch * num_blocks(length, size) if rows is None else batch * length // size + rows.shape[0]
    signals = (subtile_signals_size(k, v, size, corrects),)
    return (batch, length, heads, size), (count * (size // SUBTILE) * heads * k.shape[3],), signals


def _forward_fake(q, k, v, gain, log_decay, prior, rows, corrects, store, no_prior):
    stored = (v.new_empty(shape) for shape in stored_shapes(k, v, rows, corrects, store, no_prior))
    scores, decays, signals = _decay_shapes(k, v, log_decay, rows, corrects, store)
    decays = v.new_empty(decays, dtype=torch.float32)
    mean = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    return mean, prior.new_empty(prior.shape), *stored, v.new_empty(scores), decays, v.new_empty(signals)


def _tiling(v: Tensor, rows: Tensor | None, placeholder: Tensor) -> Tiling:
    """Return the tiles of tokens `[B, T, G, V]`, in the sequences of `rows` if it is not `None`.

    `placeholder` stands for tables that unpacked tokens do not need.
    """
    from kalmix.ops._shared.triton.tiles import tile_sequences

    segments = None if rows is None else segments_without_checks(rows)
    return tile_sequences(v.shape[0], v.shape[1], tile_size(v, rows), segments, placeholder)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    prior: Tensor,
    rows: Tensor | None,
    corrects: bool,
    store: bool,
    no_prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._linear_memory.triton.forward import allocate_results, forward

    tiling = _tiling(v, rows, q)
    per_key = store and log_decay is not None and log_decay.ndim == 4
    results = allocate_results(k, v, tiling.num_tiles, tiling.size, corrects, tiling.packed, per_key, no_prior)
    final = forward(q, k, v, gain, log_decay, prior, tiling, corrects, results, no_prior)
    states, errors, inverses = (x if store else v.new_empty(0) for x in results[1:4])
    signals = v.new_empty(0) if results.subtile_signals is None else results.subtile_signals
    return results.mean, final, states, errors, inverses, results.scores, results.subtile_decays, signals


def _dry_run(*inputs):
    """Run the forward and the backward pass, to precompile their kernels; the final belief gets no gradient."""
    *signals, _, rows, corrects, store, no_prior = inputs
    mean, _, *stored = _forward(*inputs)
    arguments: tuple[Any, ...] = (*signals, *stored, rows, mean, None, corrects, no_prior)
    if store:
        _backward(*arguments)


def _backward_fake(*inputs):
    signals, (k, v), (rows, _, _, _, no_prior) = inputs[:5], inputs[1:3], inputs[11:]
    sequences = v.shape[0] if rows is None else rows.shape[0]
    prior = (0,) if no_prior else (sequences, v.shape[2], k.shape[3], v.shape[3])
    grads = (v.new_empty(0) if x is None else x.new_empty(x.shape) for x in signals)
    return *grads, v.new_empty(prior, dtype=torch.float32)


def _zero_if_unpacked(grad_final: Tensor | None, k: Tensor, v: Tensor, rows: Tensor | None) -> Tensor | None:
    """Return the gradient of the final memories; zeros for `None`, unless sequences are packed."""
    if grad_final is not None or rows is not None:
        return grad_final
    return zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), v.device)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    states: Tensor,
    errors: Tensor,
    inverses: Tensor,
    scores: Tensor,
    subtile_decays: Tensor,
    subtile_signals: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_final: Tensor | None,
    corrects: bool,
    no_prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._linear_memory.triton.backward import allocate_gradients, backward
    from kalmix.ops._linear_memory.triton.forward import ForwardResults

    # The gradient is in place of the mean, which is not needed.
    stored = ForwardResults(grad_mean, states, errors, inverses, scores, subtile_decays, subtile_signals)
    tiling, grad_final = _tiling(v, rows, q), _zero_if_unpacked(grad_final, k, v, rows)
    grads = allocate_gradients(q, v, gain, log_decay, tiling.packed)
    arguments = (stored, tiling, grad_mean, grad_final, corrects, grads)
    grad_prior = backward(q, k, v, gain, log_decay, *arguments, no_prior=no_prior)
    dq, dk, dv, dgain, ddecay = grads.reduce(q, gain, log_decay)
    return dq, dk, dv, dgain, ddecay, grad_prior


def _backward_to_prior(*inputs):
    """Return the gradient of the prior alone, given the arguments of `_backward`."""
    from kalmix.ops._linear_memory.triton.backward import backward
    from kalmix.ops._linear_memory.triton.forward import ForwardResults

    q, k, v, gain, log_decay, *stored, rows, grad_mean, grad_final, corrects, _ = inputs
    results = ForwardResults(grad_mean, *stored)
    tiling, grad_final = _tiling(v, rows, q), _zero_if_unpacked(grad_final, k, v, rows)
    return (backward(q, k, v, gain, log_decay, results, tiling, grad_mean, grad_final, corrects, None),)


@with_launch_cache
def _final_memory(
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    prior: Tensor,
    rows: Tensor | None,
    corrects: bool,
) -> Tensor:
    from kalmix.ops._linear_memory.triton.forward import forward

    tiling = _tiling(v, rows, k)
    return forward(k, k, v, gain, log_decay, prior, tiling, corrects, None)


_filter = register_filter_op(
    "kalmix::memory_triton",
    with_launch_cache(_forward, _dry_run, precompile_key),
    _forward_fake,
    with_launch_cache(_backward),
    outputs=2,
    kernel="kernel 'triton' of `additive` and `delta`",
    prior=with_launch_cache(_backward_to_prior),
    backward_fake=_backward_fake,
)
