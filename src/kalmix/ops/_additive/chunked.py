"""`additive` in chunks, in PyTorch: parallel over chunks, except for the scan of the memory over them.

Inside a chunk the read-out is linear attention with decays. A chunk maps the memory by a decay and a write.
Training stores the memory at the start of each chunk, and recomputes everything else in the backward pass. So it takes
O(T (K + V) + T K V / CHUNK) memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._shared.batching import Slicing, backpropagate_slices, empty_outputs, filter_slices
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op
from kalmix.ops._shared.decay_products import Decays
from kalmix.ops._shared.isolation import isolate_non_finite
from kalmix.ops._shared.scan import DecayAndWrite, State
from kalmix.segments import Segments
from kalmix.types import Filtered

CHUNK = 64  # tokens per chunk


def additive(signals: AdditiveSignals, belief: PointBelief, segments: Segments | None) -> Filtered:
    """Compute equation 19 of Memory by Design, with a backward pass of its own. See `kalmix.ops.additive`."""
    rows = None if segments is None else segments.rows

    def run(*tokens: Any) -> Filtered:
        mean, final, _ = _filter(*tokens, *belief, rows, needs_grad(*tokens, *belief))
        return Filtered(mean, None, PointBelief(final))

    return isolate_non_finite(run, signals, belief, segments)


def _slicing(k: Tensor, v: Tensor, rows: Tensor | None) -> Slicing:
    return Slicing(v, k.shape[2], rows, CHUNK, CHUNK * v.shape[2] * max(k.shape[3], v.shape[3]))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    mean: Tensor,
    rows: Tensor | None,
    store: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    slicing = _slicing(k, v, rows)
    (readout,), (final,), (stored,) = filter_slices(_filter_slice, (q, k, v, log_decay, gain), (mean,), slicing, store)
    return readout, final, stored


def _forward_fake(q, k, v, log_decay, gain, mean, rows, store):
    return *empty_outputs(v, (mean,)), *_slicing(k, v, rows).empty_stored((mean,), store)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    stored: Tensor,
    rows: Tensor | None,
    grad_readout: Tensor,
    grad_final: Tensor,
) -> list[Tensor]:
    signals, grads = (q, k, v, log_decay, gain), ((grad_readout,), (grad_final,))
    grad_signals, (grad_mean,) = backpropagate_slices(_backward_slice, signals, (stored,), grads, _slicing(k, v, rows))
    return [*grad_signals, grad_mean]


_filter = register_filter_op(
    "kalmix::additive_chunked",
    _forward,
    _forward_fake,
    _backward,
    outputs=2,
    kernel="kernel 'chunked' of `additive` and `ridge`",
)


def _filter_slice(chunks: Chunks, signals: list[Any], state: State) -> tuple[State, State, State]:
    x = _split_signals(chunks, AdditiveSignals(*signals), state[0].dtype)
    maps = DecayAndWrite(x.decays.total, x.exit_keys.mT @ x.values)
    (entry,), (final,) = chunks.scan(maps, (chunks.group_heads(state[0]),))
    readout = chunks.merge(x.entry_queries @ entry + x.scores @ x.values)
    return (readout,), (final.flatten(1, 2),), (entry,)


def _backward_slice(
    chunks: Chunks, signals: list[Any], stored: State, grad_readouts: list[Tensor], grad_state: State
) -> tuple[tuple[Tensor | None, ...], State]:
    (entry,), log_decay = stored, signals[3]
    x = _split_signals(chunks, AdditiveSignals(*signals), entry.dtype)
    grad_readout = chunks.split(grad_readouts[0], entry.dtype)
    maps = DecayAndWrite(x.decays.total, x.entry_queries.mT @ grad_readout)
    (grad_exit,), (grad_mean,) = chunks.scan(maps, (chunks.group_heads(grad_state[0]),), reverse=True)

    grad_entry_queries, grad_exit_keys = grad_readout @ entry.mT, x.values @ grad_exit.mT
    grad_v = x.scores.mT @ grad_readout + x.exit_keys @ grad_exit  # of `values`
    (grad_q,), grad_k, level_grads = x.decays.products_backward([x.q], x.k, [grad_readout @ x.values.mT])
    grad_q = torch.addcmul(grad_q, grad_entry_queries, x.decays.from_start)
    grad_k = torch.addcmul(grad_k, grad_exit_keys, x.decays.to_end)
    grad_log_decay = grad_gain = None
    if log_decay is not None:
        total = x.decays.total * (grad_exit * entry).sum(-1, keepdim=True)
        from_start, to_end = grad_entry_queries * x.entry_queries, grad_exit_keys * x.exit_keys
        grad_log_decay = chunks.merge(x.decays.backward(from_start, to_end, total, level_grads))
        grad_log_decay = grad_log_decay.reshape(log_decay.shape)
    if x.gain is not None:
        grad_gain = chunks.merge((grad_v * x.v).sum(-1, keepdim=True)).squeeze(-1)
        grad_v = grad_v * x.gain
    grad_q, grad_k = grad_q.sum(3, keepdim=True), grad_k.sum(3, keepdim=True)
    grad_signals = (*(chunks.merge(y) for y in (grad_q, grad_k, grad_v)), grad_log_decay, grad_gain)
    return grad_signals, (grad_mean.flatten(1, 2),)


class _ChunkedSignals(NamedTuple):
    """Signals in chunks, and quantities that the forward and the backward pass both compute from them."""

    q: Tensor  # [..., L, K]
    k: Tensor  # [..., L, K]
    v: Tensor  # [..., L, V]
    gain: Tensor | None  # [..., L, 1]
    values: Tensor  # [..., L, V], v times gain
    decays: Decays
    entry_queries: Tensor  # [..., L, K], q times the decay from the start of the chunk
    exit_keys: Tensor  # [..., L, K], k times the decay to the end of the chunk
    scores: Tensor  # [..., L, L], weights of `values` in the read-out


def _split_signals(chunks: Chunks, signals: AdditiveSignals, dtype: torch.dtype) -> _ChunkedSignals:
    q, k, v, log_decay, gain = signals
    q, k, v = (chunks.split(x, dtype) for x in (q, k, v))
    gain = None if gain is None else chunks.split(gain[..., None], dtype)
    decays = Decays(chunks.split_decay(log_decay, k))
    values, (scores,) = v if gain is None else gain * v, decays.products([q], k)
    return _ChunkedSignals(q, k, v, gain, values, decays, q * decays.from_start, k * decays.to_end, scores)
