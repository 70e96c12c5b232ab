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
from kalmix.ops._shared.batching import Slicing, backpropagate_slices, empty_outputs, filter_slices
from kalmix.ops._shared.chunking import Chunks
from kalmix.ops._shared.custom_op import needs_grad, register_filter_op
from kalmix.ops._shared.decay_products import Decays, sum_of_products
from kalmix.ops._shared.isolation import isolate_non_finite
from kalmix.ops._shared.scan import State
from kalmix.ops._shared.triangular import lower_triangle, solve_lower_triangular
from kalmix.segments import Segments
from kalmix.types import Filtered

CHUNK = 64  # largest number of tokens per chunk


def delta(signals: DeltaSignals, belief: PointBelief, segments: Segments | None) -> Filtered:
    """Compute equations 17 and 31 of Memory by Design, with a backward pass of its own. See `kalmix.ops.delta`."""
    rows = None if segments is None else segments.rows

    def run(*tokens: Any) -> Filtered:
        mean, final, _ = _filter(*tokens, *belief, rows, needs_grad(*tokens, *belief))
        return Filtered(mean, None, PointBelief(final))

    return isolate_non_finite(run, signals, belief, segments)


def _slicing(k: Tensor, v: Tensor, rows: Tensor | None) -> Slicing:
    """Return slices with chunks of as many tokens as keys are wide, rounded up to a power of two, at least 16."""
    size = min(CHUNK, max(16, 1 << (int(k.shape[3]) - 1).bit_length()))
    return Slicing(v, k.shape[2], rows, size, size * v.shape[2] * max(k.shape[3], v.shape[3]))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    log_decay: Tensor | None,
    mean: Tensor,
    rows: Tensor | None,
    store: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    slicing = _slicing(k, v, rows)
    (readout,), (final,), (stored,) = filter_slices(_filter_slice, (q, k, v, gain, log_decay), (mean,), slicing, store)
    return readout, final, stored


def _forward_fake(q, k, v, gain, log_decay, mean, rows, store):
    return *empty_outputs(v, (mean,)), *_slicing(k, v, rows).empty_stored((mean,), store)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    log_decay: Tensor | None,
    stored: Tensor,
    rows: Tensor | None,
    grad_readout: Tensor,
    grad_final: Tensor,
) -> list[Tensor]:
    signals, grads = (q, k, v, gain, log_decay), ((grad_readout,), (grad_final,))
    grad_signals, (grad_mean,) = backpropagate_slices(_backward_slice, signals, (stored,), grads, _slicing(k, v, rows))
    return [*grad_signals, grad_mean]


_filter = register_filter_op(
    "kalmix::delta_chunked", _forward, _forward_fake, _backward, outputs=2, kernel="kernel 'chunked' of `delta`"
)


def _filter_slice(chunks: Chunks, signals: list[Any], state: State) -> tuple[State, State, State]:
    x = _split_signals(chunks, DeltaSignals(*signals), state[0].dtype)
    maps = _map_of_chunks(x.decays.total, x.exit_gains, x.error_keys, x.exit_gains.mT @ x.initial_errors)
    (entry,), (final,) = chunks.scan(maps, (chunks.group_heads(state[0]),))
    readout = chunks.merge(x.entry_queries @ entry + x.scores @ x.errors(entry))
    return (readout,), (final.flatten(1, 2),), (entry,)


def _backward_slice(
    chunks: Chunks, signals: list[Any], stored: State, grad_readouts: list[Tensor], grad_state: State
) -> tuple[tuple[Tensor | None, ...], State]:
    (entry,), (_, _, _, gain, log_decay) = stored, signals
    x = _split_signals(chunks, DeltaSignals(*signals), entry.dtype)
    grad_readout, errors = chunks.split(grad_readouts[0], entry.dtype), x.errors(entry)
    grad_errors = x.scores.mT @ grad_readout
    grad_entry = x.entry_queries.mT @ grad_readout - x.error_keys.mT @ grad_errors
    maps = _map_of_chunks(x.decays.total, x.error_keys, x.exit_gains, grad_entry)
    (grad_exit,), (grad_mean,) = chunks.scan(maps, (chunks.group_heads(grad_state[0]),), reverse=True)

    grad_errors = grad_errors + x.exit_gains @ grad_exit
    grad_v = solve_lower_triangular(x.coupling, grad_errors, transposed=True, unit=True)
    grad_products = grad_readout, -grad_v  # of the products of q and of k with the memory
    grad_entry_rows, grad_exit_gains = [y @ entry.mT for y in grad_products], errors @ grad_exit.mT
    grad_scores, grad_coupling = (y @ errors.mT for y in grad_products)
    grad_coupling.diagonal(dim1=-2, dim2=-1).zero_()  # no error depends on itself
    grad_rows, grad_gains, level_grads = x.decays.products_backward((x.q, x.k), x.gains, [grad_scores, grad_coupling])
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
        grad_log_decay = chunks.merge(grad_decay).reshape(log_decay.shape)
    if gain.ndim == 4:
        grad_gain = chunks.merge(grad_gains)
    else:
        grad_gain = chunks.merge((grad_gains * x.k).sum(-1, keepdim=True)).squeeze(-1)
        grad_k = torch.addcmul(grad_k, grad_gains, x.gain)
    grad_q, grad_k = (chunks.merge(y.sum(3, keepdim=True)) for y in (grad_q, grad_k))
    return (grad_q, grad_k, chunks.merge(grad_v), grad_gain, grad_log_decay), (grad_mean.flatten(1, 2),)


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


def _map_of_chunks(decay: Tensor, left: Tensor, right: Tensor, write: Tensor) -> _AffineMap | _LowRankMap:
    """Return the maps M -> decay M - left' right M + write; their matrices are formed if chunks have many tokens."""
    if 4 * left.shape[-2] <= left.shape[-1]:
        return _LowRankMap(decay, left, right, write)
    return _AffineMap(decay, -(left.mT @ right), write)


class _AffineMap(NamedTuple):
    """Maps M -> (decay + matrix) M + write of the memory by chunks, or of its gradient in reverse."""

    decay: Tensor  # [..., K or 1, 1], a diagonal
    matrix: Tensor  # [..., K, K]
    write: Tensor  # [..., K, V]

    def __call__(self, state: State) -> State:
        return (torch.addcmul(self.write + self.matrix @ state[0], self.decay, state[0]),)


class _LowRankMap(NamedTuple):
    """Maps M -> decay M - left' right M + write."""

    decay: Tensor  # [..., K or 1, 1], a diagonal
    left: Tensor  # [..., L, K]
    right: Tensor  # [..., L, K]
    write: Tensor  # [..., K, V]

    def __call__(self, state: State) -> State:
        return (torch.addcmul(self.write - self.left.mT @ (self.right @ state[0]), self.decay, state[0]),)
