"""Division of long sequences into slices along time, so that the working set fits a CPU cache or the memory of a GPU.

Each slice is a whole number of chunks. With packed sequences whose lengths may be read, a slice has one part for each
size of chunks. `filter_slices` passes beliefs from slice to slice, `backpropagate_slices` their
gradients in reverse. A backward pass needs the states at the start of each chunk; `stored_shape` is their shape. It
decides nothing by the length: under `torch.compile` lengths are symbols, and every decision compiles once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.ops._shared.chunking import Chunks, max_packed_chunks
from kalmix.ops._shared.packing import ChainedChunks, PackedChunks, chunks_by_length
from kalmix.ops._shared.scan import State
from kalmix.types import without_autocast

MAX_ENTRIES_CPU = 1 << 19  # entries of one tensor of a slice; a few such tensors fit the cache
MAX_ENTRIES_GPU = 1 << 25  # the same on other devices: enough to keep a GPU busy
MIN_CHUNKS = 4  # smaller slices have one chunk, which needs no scan over chunks
CHUNKS_PER_SEGMENT = 4  # minimum per slice where lengths are not read: each packed sequence may add a partial chunk


class Slicing(NamedTuple):
    """Division of a call into slices and chunks.

    Attributes:
        v: values `[B, T, G, V]`.
        key_heads: H.
        rows: rows of `Segments`, or `None`.
        chunk: tokens per chunk.
        entries: entries that one chunk of one batch row has in the largest intermediate tensor.
    """

    v: Tensor
    key_heads: int
    rows: Tensor | None
    chunk: int
    entries: int

    @property
    def length(self) -> int:
        """Number of tokens of a slice."""
        max_entries = MAX_ENTRIES_CPU if self.v.device.type == "cpu" else MAX_ENTRIES_GPU
        batch = self.v.shape[0]
        chunks = max_entries // (batch * self.entries)
        if self.rows is None:
            return self.chunk * (chunks if chunks >= MIN_CHUNKS else 1)
        least = MIN_CHUNKS if reads_lengths(self.v) else CHUNKS_PER_SEGMENT * -(-self.rows.shape[0] // batch)
        return self.chunk * torch.sym_max(chunks, least)  # pyright: ignore[reportReturnType]

    def stored_shape(self, state: Tensor) -> tuple[int, ...]:
        """Return the shape `[chains, P, H, G / H, *]` of states `[N, G, *]` at the start of chunks.

        For packed sequences P is an upper bound.
        """
        batch, length = self.v.shape[:2]
        heads = (self.key_heads, state.shape[1] // self.key_heads)
        if self.rows is None:
            return batch, -(-length // self.chunk), *heads, *state.shape[2:]
        slices, sequences = -(-length // self.length), self.rows.shape[0]
        # The end of a slice splits one sequence of each row.
        runs = sequences + batch * (slices - 1) if reads_lengths(self.v) else slices * sequences
        count = max_packed_chunks(batch, length, self.chunk, runs)
        return 1, count, *heads, *state.shape[2:]

    def empty_stored(self, state: State, store: bool) -> list[Tensor]:
        """Return uninitialized tensors of the sizes of stored states; empty unless `store`.

        They are flat: `torch.compile` would compile once more for an axis that may have size 1.
        """
        return [x.new_empty(prod(self.stored_shape(x)) if store else 0) for x in state]

    def parts(self) -> list[_Part]:
        """Return the parts of all slices, in order."""
        (batch, length), parts = self.v.shape[:2], []
        for start in range(0, length, self.length):
            stop = min(start + self.length, length)
            if self.rows is None:
                tokens = slice(start, stop)
                parts.append(_Part(tokens, Chunks.create(self.v[:, tokens], self.key_heads, self.chunk)))
                continue
            rows = torch.cat([self.rows[:, :1], self.rows[:, 1:].clamp(start, stop)], 1)
            if reads_lengths(self.v):
                found = chunks_by_length(rows, batch, length, self.chunk, self.key_heads)
            else:
                found = [ChainedChunks(rows, (batch, length), stop - start, self.chunk, self.key_heads)]
            parts += [_Part(slice(start, stop), chunks) for chunks in found]
        if self.rows is not None and not parts:  # no sequence has a token
            chunks = ChainedChunks(self.rows, (batch, length), min(self.length, length), self.chunk, self.key_heads)
            parts.append(_Part(slice(0, length), chunks))
        return parts

    def running_states(self, state: State) -> State:
        """Return states that `PackedChunks.put` may change in place."""
        return state if self.rows is None else tuple(x.clone(memory_format=torch.contiguous_format) for x in state)

    def join(self, parts: list[_Part], columns: Sequence[Tensor]) -> Tensor:
        """Return one result of all parts as `[B, T, ...]`; with segments 0 at tokens outside every sequence."""
        if self.rows is None:
            return torch.cat(tuple(columns), 1) if len(columns) > 1 else columns[0].contiguous()
        batch, length = self.v.shape[:2]
        tokens = columns[0].new_zeros(batch * length + 1, *columns[0].shape[2:])  # the last row takes missing tokens
        for part, x in zip(parts, columns, strict=True):
            assert isinstance(part.chunks, PackedChunks)
            tokens.index_copy_(0, part.chunks.index, x[0])
        return tokens[:-1].unflatten(0, (batch, length))


class _Part(NamedTuple):
    tokens: slice
    chunks: Chunks

    def cut(self, signals: Sequence[Tensor | None]) -> list[Any]:
        if isinstance(self.chunks, PackedChunks):
            return [None if x is None else self.chunks.gather(x.flatten(0, 1)) for x in signals]
        return [None if x is None else x[:, self.tokens] for x in signals]


def filter_slices(
    function: Callable[[Chunks, list[Any], State], tuple[Sequence[Tensor], State, State]],
    signals: Sequence[Tensor | None],
    state: State,
    slicing: Slicing,
    store: bool,
) -> tuple[list[Tensor], State, list[Tensor]]:
    """Filter slice by slice; the final state of a slice is the prior of the next.

    Args:
        function: filters one slice, given its chunks, signals and prior; returns the read-outs, the final state, and
            the states at the start of the chunks.
        signals: `[B, T, ...]` or `None`.
        state: prior, tensors `[N, G, *]`.
        slicing: the slices.
        store: whether to return the states at the start of chunks.

    Returns:
        The read-outs `[B, T, ...]`, the first in the dtype of the values; the final state; and the states at the start
        of chunks, flat, or empty.
    """
    readouts, entries, prior, parts = [], [], state, slicing.parts()
    with without_autocast(slicing.v.device):
        state = slicing.running_states(prior)
        for part in parts:
            readout, own, entry = function(part.chunks, part.cut(signals), part.chunks.take(state))
            state = part.chunks.put(state, own)
            readouts.append(readout)
            entries.append(entry)
    stored = [x.new_empty(0) for x in prior]
    if store:
        stored = [
            _pad_chunks(_concatenate(x), slicing.stored_shape(y)[1]).flatten()
            for x, y in zip(zip(*entries, strict=True), prior, strict=True)
        ]
    readout, *others = (slicing.join(parts, x) for x in zip(*readouts, strict=True))
    return [readout.to(slicing.v.dtype), *others], tuple(x.contiguous() for x in state), stored


def backpropagate_slices(
    function: Callable[[Chunks, list[Any], State, list[Any], State], tuple[Sequence[Tensor | None], State]],
    signals: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    grads: tuple[Sequence[Tensor], State],
    slicing: Slicing,
) -> tuple[list[Tensor], State]:
    """Compute the gradients of `filter_slices`, last slice first.

    Args:
        function: backward pass of one slice, given its chunks, signals, states at the start of chunks, and gradients of
            read-outs and final state; returns gradients of signals (`None` for `None`) and of the prior.
        signals: `[B, T, ...]` or `None`.
        stored: states that `filter_slices` returned.
        grads: gradients of the read-outs and of the final state.
        slicing: the slices.

    Returns:
        Gradients of the signals (empty for `None`), in their dtypes, and of the prior.
    """
    (grad_readouts, state), parts, results = grads, slicing.parts(), []
    stored = [x.view(slicing.stored_shape(y)) for x, y in zip(stored, state, strict=True)]
    end = sum(part.chunks.count for part in parts)
    with without_autocast(slicing.v.device):
        state = slicing.running_states(state)
        for part in reversed(parts):
            entry = tuple(x[:, end - part.chunks.count : end] for x in stored)
            end -= part.chunks.count
            own = part.chunks.take(state)
            signal_grads, own = function(part.chunks, part.cut(signals), entry, part.cut(grad_readouts), own)
            state = part.chunks.put(state, own)
            results.append(signal_grads)
    columns = zip(*reversed(results), strict=True)
    pairs = zip(signals, columns, strict=True)
    signal_grads = [slicing.v.new_empty(0) if x is None else slicing.join(parts, y).to(x.dtype) for x, y in pairs]
    return signal_grads, tuple(x.contiguous() for x in state)


def reads_lengths(x: Tensor) -> bool:
    """Return whether the lengths of sequences on the device of `x` may be read, which synchronises a GPU."""
    return x.device.type == "cpu"


def empty_outputs(v: Tensor, state: State) -> list[Tensor]:
    """Return uninitialized tensors of the shapes of the first read-out and of the final state."""
    return [x.new_empty(x.shape) for x in (v, *state)]


def _concatenate(parts: Sequence[Any]) -> Tensor:
    """Concatenate along dim 1 to a contiguous tensor."""
    return torch.cat(tuple(parts), 1) if len(parts) > 1 else parts[0].contiguous()


def _pad_chunks(x: Tensor, count: int) -> Tensor:
    """Append zeros until there are `count` chunks."""
    missing = count - x.shape[1]
    return pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else x
