"""Division of long sequences into slices along time, so that the working set fits a CPU cache or the memory of a GPU.

Each slice is a whole number of chunks. `filter_slices` passes beliefs from slice to slice, `backpropagate_slices` their
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
from kalmix.ops._shared.scan import State

MAX_ENTRIES_CPU = 1 << 19  # entries of one tensor of a slice; a few such tensors fit the cache
MAX_ENTRIES_GPU = 1 << 25  # the same on other devices: enough to keep a GPU busy
MIN_CHUNKS = 4  # smaller slices have one chunk, which needs no scan over chunks
CHUNKS_PER_SEGMENT = 4  # minimum per slice, since each packed sequence may add a partial chunk


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
        return self.chunk * torch.sym_max(chunks, CHUNKS_PER_SEGMENT * -(-self.rows.shape[0] // batch))  # pyright: ignore[reportReturnType]

    def stored_shape(self, state: Tensor) -> tuple[int, ...]:
        """Return the shape `[chains, P, H, G / H, *]` of states `[N, G, *]` at the start of chunks.

        For packed sequences P is an upper bound.
        """
        batch, length = self.v.shape[:2]
        heads = (self.key_heads, state.shape[1] // self.key_heads)
        if self.rows is None:
            return batch, -(-length // self.chunk), *heads, *state.shape[2:]
        slices = -(-length // self.length)
        count = max_packed_chunks(batch, length, self.chunk, slices * self.rows.shape[0])
        return 1, count, *heads, *state.shape[2:]

    def empty_stored(self, state: State, store: bool) -> list[Tensor]:
        """Return uninitialized tensors of the sizes of stored states; empty unless `store`.

        They are flat: `torch.compile` would compile once more for an axis that may have size 1.
        """
        return [x.new_empty(prod(self.stored_shape(x)) if store else 0) for x in state]

    def slices(self) -> list[_Slice]:
        """Return all slices, in order."""
        size, slices = self.length, []
        for start in range(0, self.v.shape[1], size):
            tokens = slice(start, start + size)
            rows = None if self.rows is None else _clip_rows(self.rows, start, start + size)
            slices.append(_Slice(tokens, Chunks.create(self.v[:, tokens], self.key_heads, rows, self.chunk)))
        return slices


class _Slice(NamedTuple):
    tokens: slice
    chunks: Chunks

    def cut(self, signals: Sequence[Tensor | None]) -> list[Any]:
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
    readouts, entries, prior = [], [], state
    with torch.autocast(slicing.v.device.type, enabled=False):
        for part in slicing.slices():
            readout, state, entry = function(part.chunks, part.cut(signals), state)
            readouts.append(readout)
            entries.append(entry)
    stored = [x.new_empty(0) for x in prior]
    if store:
        stored = [
            _pad_chunks(_concatenate(x), slicing.stored_shape(y)[1]).flatten()
            for x, y in zip(zip(*entries, strict=True), prior, strict=True)
        ]
    (readout, *others), final = map(_concatenate, zip(*readouts, strict=True)), tuple(x.contiguous() for x in state)
    return [readout.to(slicing.v.dtype), *others], final, stored


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
    (grad_readouts, state), slices, results = grads, slicing.slices(), []
    stored = [x.view(slicing.stored_shape(y)) for x, y in zip(stored, state, strict=True)]
    end = sum(part.chunks.count for part in slices)
    with torch.autocast(slicing.v.device.type, enabled=False):
        for part in reversed(slices):
            entry = tuple(x[:, end - part.chunks.count : end] for x in stored)
            end -= part.chunks.count
            signal_grads, state = function(part.chunks, part.cut(signals), entry, part.cut(grad_readouts), state)
            results.append(signal_grads)
    columns = zip(*reversed(results), strict=True)
    pairs = zip(signals, columns, strict=True)
    signal_grads = [slicing.v.new_empty(0) if x is None else _concatenate(column).to(x.dtype) for x, column in pairs]
    return signal_grads, tuple(x.contiguous() for x in state)


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


def _clip_rows(rows: Tensor, start: int, stop: int) -> Tensor:
    """Restrict the rows of `Segments` to the tokens from `start` to `stop`; token indices count from `start`."""
    return torch.cat([rows[:, :1], rows[:, 1:].clamp(start, stop) - start], 1)
