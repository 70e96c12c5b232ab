"""`additive` in chunks, in PyTorch: parallel over chunks, except for the scan of the memory over them.

Inside a chunk the read-out is linear attention with decays. A chunk maps the memory by a decay and a write. The
backward pass stores the memory at the start of each chunk and recomputes everything else, so that training takes
O(T (K + V) + T K V / CHUNK) memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._shared.batching import filter_in_slices
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import once_differentiable
from kalmix.ops._shared.decay_products import Decays
from kalmix.ops._shared.isolation import isolate_non_finite
from kalmix.ops._shared.scan import DecayAndWrite
from kalmix.segments import Segments
from kalmix.types import Filtered

CHUNK = 64  # tokens per chunk


def additive(signals: AdditiveSignals, belief: PointBelief, segments: Segments | None) -> Filtered:
    """Compute equation 19 of Memory by Design, with a backward pass of its own. See `kalmix.ops.additive`."""
    entries = CHUNK * signals.v.shape[2] * max(signals.k.shape[3], signals.v.shape[3])

    def run(*tokens: Any) -> Filtered:
        return filter_in_slices(_Additive.apply, tokens, belief, segments, entries, CHUNK)

    return isolate_non_finite(run, signals, belief, segments)


class _Additive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        gain: Tensor | None,
        mean: Tensor,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        chunks = Chunks.create(v, q.shape[2], rows, CHUNK)
        x = _split_signals(chunks, AdditiveSignals(q, k, v, log_decay, gain), mean.dtype)
        maps = DecayAndWrite(x.decays.total, x.exit_keys.mT @ x.values)
        (entry,), (final,) = chunks.scan(maps, (chunks.group_heads(mean),))
        readout = chunks.merge(x.entry_queries @ entry + x.scores @ x.values)
        ctx.save_for_backward(q, k, v, log_decay, gain, rows, entry)
        if readout.dtype != v.dtype:  # an identity cast returns its input, whose gradient torch 2.11 loses
            readout = readout.to(v.dtype)
        return readout, final.flatten(1, 2)

    @staticmethod
    @once_differentiable("kernel 'chunked' of `additive` and `ridge`")
    def backward(ctx: Any, grad_readout: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, log_decay, gain, rows, entry = ctx.saved_tensors
        chunks = Chunks.create(v, q.shape[2], rows, CHUNK)
        x = _split_signals(chunks, AdditiveSignals(q, k, v, log_decay, gain), entry.dtype)
        grad_readout = chunks.split(grad_readout, entry.dtype)
        maps = DecayAndWrite(x.decays.total, x.entry_queries.mT @ grad_readout)
        (grad_exit,), (grad_mean,) = chunks.scan(maps, (chunks.group_heads(grad_final),), reverse=True)

        grad_entry_queries, grad_exit_keys = grad_readout @ entry.mT, x.values @ grad_exit.mT
        grad_values = x.scores.mT @ grad_readout + x.exit_keys @ grad_exit
        (grad_q,), grad_k, level_grads = x.decays.products_backward([x.q], x.k, [grad_readout @ x.values.mT])
        grad_q = torch.addcmul(grad_q, grad_entry_queries, x.decays.from_start)
        grad_k = torch.addcmul(grad_k, grad_exit_keys, x.decays.to_end)
        grad_log_decay = grad_gain = None
        if log_decay is not None:
            total = x.decays.total * (grad_exit * entry).sum(-1, keepdim=True)
            from_start, to_end = grad_entry_queries * x.entry_queries, grad_exit_keys * x.exit_keys
            grad_log_decay = chunks.merge(x.decays.backward(from_start, to_end, total, level_grads))
            grad_log_decay = grad_log_decay.reshape(log_decay.shape).to(log_decay.dtype)
        grad_v = grad_values
        if x.gain is not None:
            grad_gain = chunks.merge((grad_values * x.v).sum(-1, keepdim=True)).squeeze(-1).to(gain.dtype)
            grad_v = grad_values * x.gain
        grad_q, grad_k = grad_q.sum(3, keepdim=True), grad_k.sum(3, keepdim=True)
        grad_q, grad_k, grad_v = (chunks.merge(y).to(v.dtype) for y in (grad_q, grad_k, grad_v))
        return grad_q, grad_k, grad_v, grad_log_decay, grad_gain, grad_mean.flatten(1, 2), None


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
