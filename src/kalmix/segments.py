"""Packed geometry: which tokens of a batch belong to which sequence.

A sequence is one contiguous run of one batch row. Packing and padding are the same thing seen from two sides,
and both reach an op only as `Segments`; kernels see `Tiles`, the runs cut into equal pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.validation import can_check_values, check_dtype_and_device, check_shape


class Segments(NamedTuple):
    """Runs of tokens: `rows` is int32 `[N, 3]`, each (batch row, start, stop), runs of a row not overlapping.

    Tokens outside every run leave beliefs untouched, read out 0 and have no gradient, whatever they hold. NaN, infinity
    and overflow in one run reach no other. Within a run, NaN and infinity in inputs reach no earlier token, except in
    Triton and CUDA kernels, where they may reach earlier tokens of the same tile.

    A run may be empty (start = stop). Beliefs have one entry a run, in the order of `rows`.

    Every constructor checks: shape and dtype always, values where they may be looked at (`kalmix.validation`).
    Functions
    that map over trees of tensors may put other objects in the place of `rows`; ops refuse those.

    Raises:
        ArgumentError: `rows` is not int32 `[N, 3]`, an entry is negative, a run stops before it starts, or runs
            overlap.
    """

    rows: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Segments:
        """Build segments from int32 or int64 `[N, 3]` rows.

        Raises:
            ArgumentError: as the class does.
        """
        return cls(rows.to(torch.int32) if isinstance(rows, Tensor) and rows.dtype == torch.int64 else rows)

    @classmethod
    def packed(cls, cu_seqlens: Tensor) -> Segments:
        """Sequences laid end to end in one batch row: `cu_seqlens` is `[N + 1]`, 0 first, not decreasing."""
        if not isinstance(cu_seqlens, Tensor):
            raise ArgumentError("cu_seqlens", got=f"a {type(cu_seqlens).__name__}", expected="an int32 tensor [N + 1]")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                "cu_seqlens", got=f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}", expected="int32 of shape [N + 1]"
            )
        if can_check_values(cu_seqlens) and (int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any())):
            raise ArgumentError("cu_seqlens", got=cu_seqlens.tolist(), expected="0 first and not decreasing")
        start, stop = cu_seqlens[:-1], cu_seqlens[1:]
        return segments_without_checks(torch.stack([torch.zeros_like(start), start, stop], dim=1).to(torch.int32))

    @classmethod
    def padded(cls, mask: Tensor) -> Segments:
        """One sequence a row from a padding mask `[B, T]`, true (or 1) at tokens; padding left, right or both.

        Raises:
            ArgumentError: a hole, that is padding between two tokens of a row.
        """
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            got = list(mask.shape) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise ArgumentError("mask", got=got, expected="a tensor [B, T]")
        mask = mask != 0
        count = mask.sum(1)
        start = mask.int().argmax(1) if mask.shape[1] else count
        if can_check_values(mask):
            position = torch.arange(mask.shape[1], device=mask.device)
            run = (position >= start[:, None]) & (position < (start + count)[:, None])
            if bool((run != mask).any()):
                row = int((run != mask).any(1).int().argmax())
                raise ArgumentError(
                    "mask", problem=f"has a gap in row {row}", expected="one contiguous run of tokens in each row"
                )
        row = torch.arange(mask.shape[0], device=mask.device)
        return segments_without_checks(torch.stack([row, start, start + count], dim=1).to(torch.int32))

    @classmethod
    def whole(cls, batch: int, length: int, device: torch.device | str | None = None) -> Segments:
        """Every batch row one sequence: what `segments=None` means."""
        row = torch.arange(batch, device=device)
        return segments_without_checks(
            torch.stack([row, torch.zeros_like(row), torch.full_like(row, length)], dim=1).to(torch.int32)
        )

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """N, the number of sequences."""
        return self.rows.shape[0]

    def cpu(self) -> Segments:
        """Return the same runs on the CPU; checks the values of those that come from a GPU."""
        return self if self.rows.is_cpu else Segments(self.rows.cpu())

    def segment_ids(self, batch: int, length: int) -> Tensor:
        """The sequence each token belongs to, int64 `[B, T]`, -1 for none; O(B T log N), no host sync."""
        token = torch.arange(batch * length, device=self.rows.device)
        if self.count == 0:
            return torch.full_like(token, -1).view(batch, length)
        row, start, stop = self.rows.long().unbind(1)
        begin = torch.where(stop > start, row * length + start, batch * length)  # empty runs own nothing, and lie last
        order = begin.argsort()
        segment_ids = order[(torch.searchsorted(begin[order], token, right=True) - 1).clamp(min=0)]
        inside = (token >= begin[segment_ids]) & (token < row[segment_ids] * length + stop[segment_ids])
        return torch.where(inside, segment_ids, -1).view(batch, length)

    def tiles(self, batch: int, length: int, size: int) -> Tiles:
        """The runs cut into tiles of at most `size` tokens, none spanning two runs; O(tiles), no host sync."""
        if self.count == 0:
            none = self.rows.new_zeros(0, dtype=torch.int64)
            return Tiles(none, none, none, none.bool(), none)
        row, start, stop = self.rows.long().unbind(1)
        pieces = (stop - start + size - 1) // size
        ends = pieces.cumsum(0)
        index = torch.arange(batch * length // size + self.count, device=self.rows.device)
        sequence = torch.searchsorted(ends, index, right=True)
        used = sequence < self.count
        segment_ids = sequence.clamp(max=self.count - 1)
        within = index - (ends - pieces)[segment_ids]
        begin = start[segment_ids] + within * size
        return Tiles(
            sequence=torch.where(used, segment_ids, 0),
            token=torch.where(used, row[segment_ids] * length + begin, 0),
            count=torch.where(used, (stop[segment_ids] - begin).clamp(max=size), 0),
            first=used & (within == 0),
            last=torch.where(pieces > 0, ends - 1, -1),
        )


def segments_without_checks(rows: Tensor) -> Segments:
    """Return segments of rows that were checked before or come from checked ones: for kernels and caches."""
    return Segments._make((rows,))


def _check(self: Segments, rows: Tensor) -> None:
    if not isinstance(rows, Tensor):
        if isinstance(rows, list | tuple) or hasattr(rows, "__array__"):
            raise ArgumentError("segments", got=f"a {type(rows).__name__}", expected="an int32 tensor [N, 3]")
        return  # such as the 0 that `torch.func.vmap` counts leaves with
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype != torch.int32:
        raise ArgumentError("segments", got=f"{rows.dtype} {list(rows.shape)}", expected="int32 [N, 3]")
    if not can_check_values(rows) or rows.numel() == 0:
        return
    batch, start, stop = rows.long().unbind(1)
    if bool((rows < 0).any()) or bool((stop < start).any()):
        raise ArgumentError("segments", got=rows.tolist(), expected="(batch row, start, stop), 0 <= start <= stop")
    order = torch.argsort(start, stable=True)
    order = order[torch.argsort(batch[order], stable=True)]
    order = order[(stop > start)[order]]
    ahead, behind = order[1:], order[:-1]
    if bool(((batch[ahead] == batch[behind]) & (start[ahead] < stop[behind])).any()):
        raise ArgumentError("segments", got=rows.tolist(), expected="runs that do not overlap")


torch.serialization.add_safe_globals([Segments])
Segments.__init__ = _check  # pyright: ignore[reportAttributeAccessIssue] # the body of a NamedTuple may not define it


class Tiles(NamedTuple):
    """Runs cut into P tiles, those of a run consecutive and in order; P is a static bound, unused tiles last.

    Attributes:
        sequence: int64 `[P]`, the run a tile belongs to (0 if unused).
        token: int64 `[P]`, where its first token lies in the flattened `[B * T]` batch (0 if unused).
        count: int64 `[P]`, how many tokens it holds; 0 if unused.
        first: bool `[P]`, whether it is the first tile of its run.
        last: int64 `[N]`, each run's last tile; -1 if the run is empty.
    """

    sequence: Tensor
    token: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    first: Tensor
    last: Tensor


def check_segments(segments: Segments | None, batch: int, length: int, device: torch.device) -> int:
    """Check that segments fit a batch of `batch` rows and `length` tokens; return N, the number of sequences.

    Without segments each row is one sequence. Values are checked where they may be looked at.

    Raises:
        ArgumentError: `segments` is no `Segments`, is on another device, or reaches beyond the batch.
    """
    if segments is None:
        return batch
    if not isinstance(segments, Segments):
        raise ArgumentError("segments", got=f"a {type(segments).__name__}", expected="kalmix.Segments")
    rows = segments.rows
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != 3:
        check_shape("segments.rows", rows, "N 3", {"3": 3})
    check_dtype_and_device("segments", rows, (torch.int32,), device)
    if can_check_values(rows) and rows.shape[0]:
        least, (row, _, stop) = (bound.tolist() for bound in rows.aminmax(dim=0))
        if min(least) < 0 or row >= batch or stop > length:
            raise ArgumentError(
                "segments",
                got=f"up to batch row {row} and token {stop}",
                expected=f"within batch {batch} and length {length}",
            )
    return rows.shape[0]
