"""Division of sequences into chunks of equal size, and scans of states over the chunks.

A layout of chunks is computed for each call. `split` and `merge` convert tensors of tokens to chunks and back; `scan`
passes states from chunk to chunk, forward or in reverse. In `Chunks` a chain of consecutive chunks is a batch row; in
`kalmix.ops._shared.packing`, packed sequences are. Chunks run inside custom ops, which `torch.compile` does not trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.ops._shared.scan import MapsWithReset, State, scan


class Chunks:
    """Layout of tokens in chunks: each batch row is a chain of P chunks of L tokens.

    In chunks, value heads have two axes: `[H, G / H]`, where H is the key head that they use.
    """

    @staticmethod
    def create(v: Tensor, key_heads: int, size: int) -> Chunks:
        """Return the layout for values `[B, T, G, V]`.

        L is `size`, a power of two, or the smallest power of two that holds all T tokens.
        """
        return Chunks(v.shape[0], v.shape[1], v.device, key_heads, min(size, 1 << (v.shape[1] - 1).bit_length()))

    def __init__(self, batch: int, length: int, device: torch.device, key_heads: int, size: int) -> None:
        self.batch, self.length, self.device = batch, length, device
        self.key_heads, self.size = key_heads, size
        self.chains, self.count = batch, -(-length // size)
        self.needs_scan = self.count > 1

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert `[B, T, H or G, *]` to `[chains, P, H, 1 or G / H, L, *]`, with zeros where there is no token."""
        x, missing = x.to(dtype), -self.length % self.size
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return self._split_heads(x.unflatten(1, (-1, self.size)))

    def merge(self, x: Tensor) -> Tensor:
        """Convert `[chains, P, H, G / H, L, *]` to `[B, T, G, *]`, with zeros at tokens outside every sequence."""
        return self._merge_heads(x).flatten(1, 2)[:, : self.length]

    def split_decay(self, log_decay: Tensor | None, like: Tensor) -> Tensor:
        """Convert log-decays like `split`, with a last axis of size 1 (per head) or K (per key); zeros for `None`."""
        if log_decay is None:
            return like.new_zeros(()).expand(self.chains, self.count, 1, 1, self.size, 1)
        return self.split(log_decay if log_decay.ndim == 4 else log_decay[..., None], like.dtype)

    def valid_at(self, position: int) -> Tensor | None:
        """Return which chunks have a token at `position`, `[P, 1, 1, 1, 1]`; `None` if all have one."""
        if (self.count - 1) * self.size + position < self.length:
            return None
        return broadcastable(torch.arange(self.count, device=self.device) < self.count - 1)

    def group_heads(self, x: Tensor) -> Tensor:
        """Convert states `[N, G, *]`, one per sequence, to `[N, H, G / H, *]`."""
        return x.unflatten(1, (self.key_heads, -1))

    def take(self, states: State) -> State:
        """Return the states of the sequences of these chunks, from those of all sequences."""
        return states

    def put(self, states: State, own: State) -> State:
        """Replace the states of the sequences of these chunks."""
        return own

    def entry_of_single_chunks(self, states: State) -> State:
        """Return the states `[chains, P, H, G / H, ...]` at the start of chunks if no sequence has a second chunk."""
        return tuple(x[:, None].clone() for x in states)

    def scan(self, maps: Any, states: State, reverse: bool = False) -> tuple[State, State]:
        """Pass states through the maps of consecutive chunks.

        Args:
            maps: named tuple of tensors `[chains, P, H, G / H, ...]`, the map of each chunk: see `scan`. Its last
                tensors are the images of zero states.
            states: `[N, H, G / H, ...]`, the initial state of every sequence (if `reverse`, the state after it).
            reverse: whether to apply the maps from the last chunk to the first.

        Returns:
            The states `[chains, P, H, G / H, ...]` that each chunk's map is applied to, and the final states
            `[N, H, G / H, ...]` of the sequences.
        """
        entry = scan(MapsWithReset(maps), states, reverse)
        end = 0 if reverse else -1
        return entry, type(maps)(*(x[:, end] for x in maps))(tuple(x[:, end] for x in entry))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(3, (self.key_heads, -1)).movedim(2, 4).contiguous()

    def _merge_heads(self, x: Tensor) -> Tensor:
        return x.movedim(4, 2).flatten(3, 4)


def max_packed_chunks(batch: int, length: int, size: int, sequences: int) -> int:
    """Return the largest number of chunks of `size` tokens that packed sequences in `[B, T]` tokens can have."""
    return batch * ((length - 1) // size) + sequences


def broadcastable(flag: Tensor) -> Tensor:
    """Reshape flags `[P]` to `[P, 1, 1, 1, 1]`."""
    return flag.view(-1, *(1,) * 4)
