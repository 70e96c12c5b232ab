"""`delta` in chunks: torch only, all chunks at once but for the memory carried from one to the next.

Inside a chunk the errors that tokens correct solve a unit triangular system, linear in the memory that enters (the WY
form, with any vector gain), so a chunk is an affine map of the memory. Training keeps the memory that enters each chunk
and recomputes the rest: O(T (K + V) + T K V / CHUNK). Work is O(K (CHUNK + K + V)) a token and value head: value heads
of width 1 pay for a K x K map all the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._shared.batching import in_blocks
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import once_differentiable
from kalmix.ops._shared.decay_products import Decays, inner
from kalmix.ops._shared.isolation import isolate
from kalmix.ops._shared.scan import State
from kalmix.ops._shared.triangular import lower, solve_lower
from kalmix.segments import Segments
from kalmix.types import Filtered

CHUNK = 64  # tokens of a chunk, at most; as many as keys are wide, but 16 at least


def delta(signals: DeltaSignals, belief: PointBelief, segments: Segments | None) -> Filtered:
    """Equations 17 and 31 of Memory by Design, with a backward of its own. See `kalmix.ops.delta`."""
    size = _chunk(signals.k)
    entries = size * signals.v.shape[2] * max(signals.k.shape[3], signals.v.shape[3])

    def filtered(*tokens: Any) -> Filtered:
        return in_blocks(_Delta.apply, tokens, belief, segments, entries, size)

    return isolate(filtered, signals, belief, segments)


def _chunk(k: Tensor) -> int:
    """Tokens of a chunk: a power of two, which `Decays` halves."""
    return min(CHUNK, max(16, 1 << (int(k.shape[3]) - 1).bit_length()))


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gain: Tensor,
        log_decay: Tensor | None,
        mean: Tensor,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        chunks = Chunks.of(v, q.shape[2], rows, _chunk(k))
        x = _tokens(chunks, DeltaSignals(q, k, v, gain, log_decay), mean.dtype)
        advance = _Advance(x.decays.path, -(x.leaving.mT @ x.expected), x.leaving.mT @ x.unexpected)
        (entry,), (after,) = chunks.scan(advance, (chunks.states(mean),))
        read = chunks.paste(x.arriving[0] @ entry + x.weights @ x.errors(entry))
        ctx.save_for_backward(q, k, v, gain, log_decay, rows, entry)
        if read.dtype != v.dtype:  # a cast that changes nothing returns its input, whose gradient torch 2.11 loses
            read = read.to(v.dtype)
        return read, after.flatten(1, 2)

    @staticmethod
    @once_differentiable("kernel 'chunked' of `delta`")
    def backward(ctx: Any, to_read: Tensor, to_after: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, gain, log_decay, rows, entry = ctx.saved_tensors
        chunks = Chunks.of(v, q.shape[2], rows, _chunk(k))
        x = _tokens(chunks, DeltaSignals(q, k, v, gain, log_decay), entry.dtype)
        to_read, errors = chunks.cut(to_read, entry.dtype), x.errors(entry)
        to_errors = x.weights.mT @ to_read
        to_entry = x.arriving[0].mT @ to_read - x.expected.mT @ to_errors
        retreat = _Advance(x.decays.path, -(x.expected.mT @ x.leaving), to_entry)
        (to_exit,), (before,) = chunks.scan(retreat, (chunks.states(to_after),), backwards=True)

        to_errors = to_errors + x.leaving @ to_exit
        to_v = solve_lower(x.coupling, to_errors, transposed=True, unit=True)
        reads = to_read, -to_v  # by q and by k
        to_arriving, to_leaving = [y @ entry.mT for y in reads], errors @ to_exit.mT
        to_weights, to_coupling = (y @ errors.mT for y in reads)
        to_coupling.diagonal(dim1=-2, dim2=-1).zero_()  # no error is a part of itself
        to_rows, to_write, levels = x.decays.products_backward(x.rows, x.write, [to_weights, to_coupling])
        to_q, to_k = (torch.addcmul(y, to, x.decays.since) for y, to in zip(to_rows, to_arriving, strict=True))
        to_write = torch.addcmul(to_write, to_leaving, x.decays.until)
        dlog_decay = None
        if log_decay is not None:
            arriving, leaving = inner(to_arriving, x.arriving), to_leaving * x.leaving
            carried = x.decays.path * (to_exit * entry).sum(-1, keepdim=True)
            to_decay = x.decays.backward(arriving, leaving, carried, levels)
            dlog_decay = chunks.paste(to_decay).reshape(log_decay.shape).to(log_decay.dtype)
        if gain.ndim == 4:
            dgain = chunks.paste(to_write)
        else:
            dgain = chunks.paste((to_write * x.rows[1]).sum(-1, keepdim=True)).squeeze(-1)
            to_k = torch.addcmul(to_k, to_write, x.gain)
        dq, dk = (chunks.paste(y.sum(3, keepdim=True)).to(q.dtype) for y in (to_q, to_k))
        return dq, dk, chunks.paste(to_v).to(v.dtype), dgain.to(gain.dtype), dlog_decay, before.flatten(1, 2), None


class _Tokens(NamedTuple):
    """Tokens by chunks, and what forward and backward both make of them."""

    rows: tuple[Tensor, Tensor]  # [..., L, K], q and k
    gain: Tensor
    write: Tensor  # [..., L, K], along which errors are written
    decays: Decays
    arriving: tuple[Tensor, Tensor]  # `rows` as they meet the memory that enters the chunk
    leaving: Tensor  # `write` as it is left in the memory that leaves the chunk
    weights: Tensor  # [..., L, L], of errors in what is read
    coupling: Tensor  # [..., L, L], of errors in later errors
    unexpected: Tensor  # [..., L, V], the errors had the memory been 0
    expected: Tensor  # [..., L, K], which products with the memory that enters are expected

    def errors(self, entry: Tensor) -> Tensor:
        """What tokens correct, `[..., L, V]`."""
        return self.unexpected - self.expected @ entry


def _tokens(chunks: Chunks, signals: DeltaSignals, dtype: torch.dtype) -> _Tokens:
    q, k, v, gain, log_decay = signals
    vector = gain.ndim == 4
    q, k, v, gain = (chunks.cut(x, dtype) for x in (q, k, v, gain if vector else gain[..., None]))
    decays, write = Decays(chunks.cut_decay(log_decay, k)), gain if vector else gain * k
    arriving, leaving = (q * decays.since, k * decays.since), write * decays.until
    weights, coupling = decays.products((q, k), write)
    coupling = lower(coupling, -1)
    right = torch.cat([v, arriving[1].expand(*v.shape[:-1], -1)], -1)
    unexpected, expected = solve_lower(coupling, right, unit=True).split([v.shape[-1], k.shape[-1]], -1)
    return _Tokens((q, k), gain, write, decays, arriving, leaving, weights, coupling, unexpected, expected)


class _Advance(NamedTuple):
    """What a chunk does to the memory, or to its adjoint."""

    path: Tensor  # [..., K or 1, 1]
    turn: Tensor  # [..., K, K]
    write: Tensor  # [..., K, V]

    def __call__(self, state: State) -> State:
        return (torch.addcmul(self.write + self.turn @ state[0], self.path, state[0]),)

    def then(self, after: _Advance) -> _Advance:
        turn = torch.addcmul(after.turn @ self.turn, after.path, self.turn) + after.turn * self.path.mT
        return _Advance(self.path * after.path, turn, *after((self.write,)))
