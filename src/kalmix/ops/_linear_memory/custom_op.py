"""Linear memories in Triton as custom ops: the one implementation behind the Triton rows of `additive` and `delta`.

The kernels are imported when they first run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op, with_launch_cache, with_precompilation
from kalmix.segments import Segments, segments_without_checks
from kalmix.types import Filtered
from kalmix.validation import FLOAT32_STATE_DTYPES

if TYPE_CHECKING:  # these ops import this module
    from kalmix.ops._additive.signals import AdditiveSignals
    from kalmix.ops._delta.signals import DeltaSignals

SERVED: dict[str, Any] = {  # what the rows say of themselves
    "devices": ("cuda",),
    "dtypes": FLOAT32_STATE_DTYPES,
    "max_key_width": 256,
    "triton": True,
    "low_precision_products": True,
}


def filter_memory(
    signals: AdditiveSignals | DeltaSignals, belief: PointBelief, segments: Segments | None, corrects: bool
) -> Filtered:
    """`kalmix.ops.delta` or, if it does not correct, `kalmix.ops.additive`.

    Gradients are exact; for them it keeps a memory every `tile_size` tokens and, of corrections, their errors and the
    inverses they came from.
    """
    tensors = (signals.q, signals.k, signals.v, signals.gain, signals.log_decay, belief.mean)
    rows = None if segments is None else segments.rows
    mean, last, *_ = _filter(*tensors, rows, corrects, needs_grad(*tensors))
    return Filtered(mean, None, PointBelief(last))


def tile_size(length: int, dtype: torch.dtype) -> int:
    """Tokens a tile: small where there are few, and in float32, whose tiles take twice the room."""
    if length <= 64:
        return 16
    return 32 if dtype == torch.float32 else 64


def kept_shapes(
    k: Tensor, v: Tensor, rows: Tensor | None, corrects: bool, keep: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of memories at tile entries, errors, and inverses."""
    batch, length, heads, width = v.shape
    size = tile_size(length, v.dtype)
    count = batch * ((length + size - 1) // size) if rows is None else batch * length // size + rows.shape[0]
    states = (count, heads, k.shape[3], width) if keep else (0,)
    return states, v.shape if keep and corrects else (0,), (*v.shape[:3], size) if keep and corrects else (0,)


def _forward_fake(q, k, v, gain, log_decay, prior, rows, corrects, keep):
    kept = (v.new_empty(shape) for shape in kept_shapes(k, v, rows, corrects, keep))
    return torch.empty(v.shape, dtype=v.dtype, device=v.device), prior.new_empty(prior.shape), *kept


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    prior: Tensor,
    rows: Tensor | None,
    corrects: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._linear_memory.triton.forward import blank, forward
    from kalmix.ops._shared.triton.tiles import tile_sequences

    segments, size = None if rows is None else segments_without_checks(rows), tile_size(v.shape[1], v.dtype)
    cut = tile_sequences(v.shape[0], v.shape[1], size, segments, q)
    results = blank(k, v, cut.num_tiles, size, corrects, cut.packed)
    last = forward(q, k, v, gain, log_decay, prior, cut, corrects, results)
    states, errors, inverses = (x if keep else v.new_empty(0) for x in results[1:])
    return results.mean, last, states, errors, inverses


def _dry_run(*inputs):
    """Run the forward and the backward pass, to precompile their kernels; the final belief gets no gradient."""
    *signals, _, rows, corrects, keep = inputs
    mean, last, *kept = _forward(*inputs)
    follow: tuple[Any, ...] = (*signals, *kept, rows, mean, last.new_zeros(()).expand(last.shape), corrects)
    if keep:
        _backward(*follow)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    states: Tensor,
    errors: Tensor,
    inverses: Tensor,
    rows: Tensor | None,
    grad_mean: Tensor,
    grad_last: Tensor,
    corrects: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.ops._linear_memory.triton.backward import backward, blank
    from kalmix.ops._linear_memory.triton.forward import Results
    from kalmix.ops._shared.triton.tiles import tile_sequences

    segments, kept = (
        None if rows is None else segments_without_checks(rows),
        Results(grad_mean, states, errors, inverses),
    )
    cut = tile_sequences(v.shape[0], v.shape[1], tile_size(v.shape[1], v.dtype), segments, q)
    grads = blank(q, v, gain, log_decay, cut.packed)
    dprior = backward(q, k, v, gain, log_decay, kept, cut, grad_mean, grad_last, corrects, grads)
    dq, dk, dv, dgain, ddecay = grads.gathered(q, gain, log_decay)
    return dq, dk, dv, dgain, ddecay, dprior


_filter = register_filter_op(
    "kalmix::memory_triton",
    with_precompilation(_dry_run, with_launch_cache(_forward)),
    _forward_fake,
    with_launch_cache(_backward),
    outputs=2,
    kernel="kernel 'triton' of `additive` and `delta`",
)
