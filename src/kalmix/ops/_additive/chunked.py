"""`additive` in chunks: torch only, all chunks at once but for the memory carried from one to the next.

Inside a chunk the read-out is that of linear attention with decays; what a chunk does to the memory is a decay and a
write. Training keeps the memory that enters each chunk and recomputes the rest: O(T (K + V) + T K V / CHUNK).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._shared.batching import in_blocks
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import once_differentiable
from kalmix.ops._shared.decay_products import Decays
from kalmix.ops._shared.isolation import isolate
from kalmix.ops._shared.scan import Writes
from kalmix.segments import Segments
from kalmix.types import Filtered

CHUNK = 64  # tokens of a chunk


def additive(signals: AdditiveSignals, belief: PointBelief, segments: Segments | None) -> Filtered:
    """Equation 19 of Memory by Design, with a backward of its own. See `kalmix.ops.additive`."""
    entries = CHUNK * signals.v.shape[2] * max(signals.k.shape[3], signals.v.shape[3])

    def filtered(*tokens: Any) -> Filtered:
        return in_blocks(_Additive.apply, tokens, belief, segments, entries, CHUNK)

    return isolate(filtered, signals, belief, segments)


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
        chunks = Chunks.of(v, q.shape[2], rows, CHUNK)
        x = _tokens(chunks, AdditiveSignals(q, k, v, log_decay, gain), mean.dtype)
        advance = Writes(x.decays.path, x.leaving.mT @ x.written)
        (entry,), (after,) = chunks.scan(advance, (chunks.states(mean),))
        read = chunks.paste(x.arriving @ entry + x.weights @ x.written)
        ctx.save_for_backward(q, k, v, log_decay, gain, rows, entry)
        if read.dtype != v.dtype:  # a cast that changes nothing returns its input, whose gradient torch 2.11 loses
            read = read.to(v.dtype)
        return read, after.flatten(1, 2)

    @staticmethod
    @once_differentiable("kernel 'chunked' of `additive` and `ridge`")
    def backward(ctx: Any, to_read: Tensor, to_after: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, log_decay, gain, rows, entry = ctx.saved_tensors
        chunks = Chunks.of(v, q.shape[2], rows, CHUNK)
        x = _tokens(chunks, AdditiveSignals(q, k, v, log_decay, gain), entry.dtype)
        to_read = chunks.cut(to_read, entry.dtype)
        retreat = Writes(x.decays.path, x.arriving.mT @ to_read)
        (to_exit,), (before,) = chunks.scan(retreat, (chunks.states(to_after),), backwards=True)

        to_arriving, to_leaving = to_read @ entry.mT, x.written @ to_exit.mT
        to_written = x.weights.mT @ to_read + x.leaving @ to_exit
        (to_q,), to_k, levels = x.decays.products_backward([x.q], x.k, [to_read @ x.written.mT])
        to_q = torch.addcmul(to_q, to_arriving, x.decays.since)
        to_k = torch.addcmul(to_k, to_leaving, x.decays.until)
        dlog_decay = dgain = None
        if log_decay is not None:
            carried = x.decays.path * (to_exit * entry).sum(-1, keepdim=True)
            to_decay = x.decays.backward(to_arriving * x.arriving, to_leaving * x.leaving, carried, levels)
            dlog_decay = chunks.paste(to_decay).reshape(log_decay.shape).to(log_decay.dtype)
        to_v = to_written
        if x.gain is not None:
            dgain = chunks.paste((to_written * x.v).sum(-1, keepdim=True)).squeeze(-1).to(gain.dtype)
            to_v = to_written * x.gain
        dq, dk, dv = (chunks.paste(y).to(v.dtype) for y in (to_q.sum(3, keepdim=True), to_k.sum(3, keepdim=True), to_v))
        return dq, dk, dv, dlog_decay, dgain, before.flatten(1, 2), None


class _Tokens(NamedTuple):
    """Tokens by chunks, and what forward and backward both make of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    gain: Tensor | None
    written: Tensor  # [..., L, V]
    decays: Decays
    arriving: Tensor  # q as it meets the memory that enters the chunk
    leaving: Tensor  # k as it is left in the memory that leaves the chunk
    weights: Tensor  # [..., L, L], of what is written in what is read


def _tokens(chunks: Chunks, signals: AdditiveSignals, dtype: torch.dtype) -> _Tokens:
    q, k, v, log_decay, gain = signals
    q, k, v = (chunks.cut(x, dtype) for x in (q, k, v))
    gain = None if gain is None else chunks.cut(gain[..., None], dtype)
    decays = Decays(chunks.cut_decay(log_decay, k))
    written, (weights,) = v if gain is None else gain * v, decays.products([q], k)
    return _Tokens(q, k, v, gain, written, decays, q * decays.since, k * decays.until, weights)
