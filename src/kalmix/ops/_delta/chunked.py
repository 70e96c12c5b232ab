"""`delta` in chunks, in PyTorch: parallel over chunks, except for the scan of the memory over them.

Inside a chunk the prediction errors solve a unit lower triangular system that is linear in the memory at the start of
the chunk (the WY form, here with any vector gain), so that a chunk is an affine map of the memory. The backward pass
stores the memory at the start of each chunk and recomputes everything else, so that training takes
O(T (K + V) + T K V / CHUNK) memory. The work is O(K (CHUNK + K + V)) per token and value head: the K x K matrix of the
affine map makes narrow value heads (V much smaller than K) inefficient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._shared.batching import filter_in_slices
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import once_differentiable
from kalmix.ops._shared.decay_products import Decays, sum_of_products
from kalmix.ops._shared.isolation import isolate_non_finite
from kalmix.ops._shared.scan import State
from kalmix.ops._shared.triangular import lower_triangle, solve_lower_triangular
from kalmix.segments import Segments
from kalmix.types import Filtered

CHUNK = 64  # largest number of tokens per chunk


def delta(signals: DeltaSignals, belief: PointBelief, segments: Segments | None) -> Filtered:
    """Compute equations 17 and 31 of Memory by Design, with a backward pass of its own. See `kalmix.ops.delta`."""
    size = _chunk_size(signals.k)
    entries = size * signals.v.shape[2] * max(signals.k.shape[3], signals.v.shape[3])

    def run(*tokens: Any) -> Filtered:
        return filter_in_slices(_Delta.apply, tokens, belief, segments, entries, size)

    return isolate_non_finite(run, signals, belief, segments)


def _chunk_size(k: Tensor) -> int:
    """Return the tokens per chunk: the key width rounded up to a power of two, between 16 and `CHUNK`."""
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
        chunks = Chunks.create(v, q.shape[2], rows, _chunk_size(k))
        x = _split_signals(chunks, DeltaSignals(q, k, v, gain, log_decay), mean.dtype)
        maps = _AffineMap(x.decays.total, -(x.exit_gains.mT @ x.error_keys), x.exit_gains.mT @ x.initial_errors)
        (entry,), (final,) = chunks.scan(maps, (chunks.group_heads(mean),))
        readout = chunks.merge(x.entry_queries @ entry + x.scores @ x.errors(entry))
        ctx.save_for_backward(q, k, v, gain, log_decay, rows, entry)
        if readout.dtype != v.dtype:  # an identity cast returns its input, whose gradient torch 2.11 loses
            readout = readout.to(v.dtype)
        return readout, final.flatten(1, 2)

    @staticmethod
    @once_differentiable("kernel 'chunked' of `delta`")
    def backward(ctx: Any, grad_readout: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, gain, log_decay, rows, entry = ctx.saved_tensors
        chunks = Chunks.create(v, q.shape[2], rows, _chunk_size(k))
        x = _split_signals(chunks, DeltaSignals(q, k, v, gain, log_decay), entry.dtype)
        grad_readout, errors = chunks.split(grad_readout, entry.dtype), x.errors(entry)
        grad_errors = x.scores.mT @ grad_readout
        grad_entry = x.entry_queries.mT @ grad_readout - x.error_keys.mT @ grad_errors
        maps = _AffineMap(x.decays.total, -(x.error_keys.mT @ x.exit_gains), grad_entry)
        (grad_exit,), (grad_mean,) = chunks.scan(maps, (chunks.group_heads(grad_final),), reverse=True)

        grad_errors = grad_errors + x.exit_gains @ grad_exit
        grad_v = solve_lower_triangular(x.coupling, grad_errors, transposed=True, unit=True)
        grad_products = grad_readout, -grad_v  # of the products of q and of k with the memory
        grad_entry_rows, grad_exit_gains = [y @ entry.mT for y in grad_products], errors @ grad_exit.mT
        grad_scores, grad_coupling = (y @ errors.mT for y in grad_products)
        grad_coupling.diagonal(dim1=-2, dim2=-1).zero_()  # no error depends on itself
        grad_rows, grad_gains, level_grads = x.decays.products_backward(
            (x.q, x.k), x.gains, [grad_scores, grad_coupling]
        )
        grad_q, grad_k = (
            torch.addcmul(y, entry_row, x.decays.from_start)
            for y, entry_row in zip(grad_rows, grad_entry_rows, strict=True)
        )
        grad_gains = torch.addcmul(grad_gains, grad_exit_gains, x.decays.to_end)
        grad_log_decay = None
        if log_decay is not None:
            from_start = sum_of_products(grad_entry_rows, (x.entry_queries, x.entry_keys))
            total = x.decays.total * (grad_exit * entry).sum(-1, keepdim=True)
            grad_decay = x.decays.backward(from_start, grad_exit_gains * x.exit_gains, total, level_grads)
            grad_log_decay = chunks.merge(grad_decay).reshape(log_decay.shape).to(log_decay.dtype)
        if gain.ndim == 4:
            grad_gain = chunks.merge(grad_gains)
        else:
            grad_gain = chunks.merge((grad_gains * x.k).sum(-1, keepdim=True)).squeeze(-1)
            grad_k = torch.addcmul(grad_k, grad_gains, x.gain)
        grad_q, grad_k = (chunks.merge(y.sum(3, keepdim=True)).to(q.dtype) for y in (grad_q, grad_k))
        grad_v, grad_gain = chunks.merge(grad_v).to(v.dtype), grad_gain.to(gain.dtype)
        return grad_q, grad_k, grad_v, grad_gain, grad_log_decay, grad_mean.flatten(1, 2), None


class _ChunkedSignals(NamedTuple):
    """Signals in chunks, and quantities that the forward and the backward pass both compute from them."""

    q: Tensor  # [..., L, K]
    k: Tensor  # [..., L, K]
    gain: Tensor  # [..., L, 1 or K], as given
    gains: Tensor  # [..., L, K], gain vectors c
    decays: Decays
    entry_queries: Tensor  # [..., L, K], q times the decay from the start of the chunk
    entry_keys: Tensor  # [..., L, K], k times the decay from the start of the chunk
    exit_gains: Tensor  # [..., L, K], `gains` times the decay to the end of the chunk
    scores: Tensor  # [..., L, L], weights of the errors in the read-out
    coupling: Tensor  # [..., L, L], weights of earlier errors in the predictions of later values
    initial_errors: Tensor  # [..., L, V], errors if the memory at the start of the chunk is 0
    error_keys: Tensor  # [..., L, K], minus the derivative of the errors with respect to that memory

    def errors(self, entry: Tensor) -> Tensor:
        """Return the prediction errors `[..., L, V]`, given the memory at the start of the chunk `[..., K, V]`."""
        return self.initial_errors - self.error_keys @ entry


def _split_signals(chunks: Chunks, signals: DeltaSignals, dtype: torch.dtype) -> _ChunkedSignals:
    q, k, v, gain, log_decay = signals
    vector = gain.ndim == 4
    q, k, v, gain = (chunks.split(x, dtype) for x in (q, k, v, gain if vector else gain[..., None]))
    decays, gains = Decays(chunks.split_decay(log_decay, k)), gain if vector else gain * k
    entry_queries, entry_keys, exit_gains = q * decays.from_start, k * decays.from_start, gains * decays.to_end
    scores, coupling = decays.products((q, k), gains)
    coupling = lower_triangle(coupling, -1)
    right = torch.cat([v, entry_keys.expand(*v.shape[:-1], -1)], -1)
    solution = solve_lower_triangular(coupling, right, unit=True)
    initial_errors, error_keys = solution.split([v.shape[-1], k.shape[-1]], -1)
    entry = entry_queries, entry_keys, exit_gains
    return _ChunkedSignals(q, k, gain, gains, decays, *entry, scores, coupling, initial_errors, error_keys)


class _AffineMap(NamedTuple):
    """Maps M -> (decay + matrix) M + write of the memory by chunks, or of its gradient in reverse."""

    decay: Tensor  # [..., K or 1, 1], a diagonal
    matrix: Tensor  # [..., K, K]
    write: Tensor  # [..., K, V]

    def __call__(self, state: State) -> State:
        return (torch.addcmul(self.write + self.matrix @ state[0], self.decay, state[0]),)

    def compose(self, after: _AffineMap) -> _AffineMap:
        matrix = torch.addcmul(after.matrix @ self.matrix, after.decay, self.matrix) + after.matrix * self.decay.mT
        return _AffineMap(self.decay * after.decay, matrix, *after((self.write,)))
