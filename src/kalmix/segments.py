"""Packing and padding: `Segments` lists the runs of tokens that form sequences; `Tiles` splits them for kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.errors import ArgumentError
from kalmix.validation import (
    MAX_INT,
    TIME_DTYPES,
    can_check_values,
    check_dtype_and_device,
    check_range,
    check_shape,
    in_transform,
)


class Segments(NamedTuple):
    """Runs of tokens that form sequences, for packed and padded batches.

    A sequence is one contiguous run of tokens in one batch row; runs of a row must not overlap, and may be empty. With
    segments, beliefs have one entry per run, in the order of `rows`.

    Pass them as `segments` to an op, `kalmix.filter` or a layer. Two methods build them:

    - `Segments.packed(cu_seqlens)`: sequences concatenated in one batch row. `cu_seqlens` is int32 or int64 `[N + 1]`,
      cumulative lengths that begin with 0 and do not decrease.
    - `Segments.padded(mask)`: one run per batch row. `mask` is `[B, T]`, of any dtype, 0 at padding, which must not lie
      between two tokens. A row of padding gives an empty run.

    Tokens outside every run do not change beliefs, give a read-out of 0 and have zero gradient. An empty run keeps its
    prior.

    Values are checked on the CPU; on a GPU only inside `kalmix.checks()`. An op then raises `ArgumentError` for NaN or
    infinity anywhere in its inputs, also in padding; layers accept them in padding. Where values are not checked, NaN
    and infinity do not reach other runs, but may reach later tokens of their own run, and in Triton and CUDA kernels
    earlier tokens of the same tile; rows that break a rule below give undefined results.

    Args:
        rows: int32 `[N, 3]`, (batch row, start, stop) of each run, in any order; `stop` is exclusive. On the device of
            the tokens.

    Raises:
        ArgumentError: `rows` is not an int32 tensor `[N, 3]`. Where values are checked: an entry is negative, a run
            stops before it starts, or runs overlap; or, from the op or layer, a run exceeds the batch. `packed` and
            `padded` raise it for their own arguments.
        RuntimeError: values are not checked, and a mask has padding between two tokens of a row.

    Example:
        >>> from kalmix import Segments, ops
        >>> packed = Segments.packed(torch.tensor([0, 3, 8]))  # two sequences, of 3 and 5 tokens
        >>> x = torch.randn(1, 8, 1, 4)
        >>> ops.additive(x, x, x, segments=packed).belief.mean.shape
        torch.Size([2, 1, 4, 4])
        >>> Segments.padded(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])).rows.tolist()
        [[0, 2, 4], [1, 0, 4]]
    """

    rows: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Segments:
        """Build segments from rows that may be int64.

        Args:
            rows: int32 or int64 `[N, 3]`, (batch row, start, stop) of each run.

        Raises:
            ArgumentError: see the class.
        """
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64:
            return cls(rows)
        _check_int32("segments", rows)
        return cls(rows.to(torch.int32))

    @classmethod
    def packed(cls, cu_seqlens: Tensor) -> Segments:
        """Build segments of sequences that are concatenated in one batch row.

        Args:
            cu_seqlens: int32 or int64 `[N + 1]`, cumulative lengths: sequence n is tokens `cu_seqlens[n]` to
                `cu_seqlens[n + 1]`. The first entry is 0.

        Raises:
            ArgumentError: it is not an integer tensor `[N + 1]`, or its values are checked and it does not begin with
                0, decreases, or exceeds int32.
        """
        if not isinstance(cu_seqlens, Tensor):
            raise ArgumentError("cu_seqlens", got=f"a {type(cu_seqlens).__name__}", expected="an int32 tensor [N + 1]")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                "cu_seqlens",
                problem=f"has dtype {cu_seqlens.dtype} and shape {list(cu_seqlens.shape)}",
                expected="int32 [N + 1]",
            )
        if can_check_values(cu_seqlens) and (int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any())):
            raise ArgumentError(
                "cu_seqlens", got=cu_seqlens.tolist(), expected="non-decreasing lengths that begin with 0"
            )
        _check_int32("cu_seqlens", cu_seqlens)
        start, stop = cu_seqlens[:-1], cu_seqlens[1:]
        return segments_without_checks(torch.stack([torch.zeros_like(start), start, stop], dim=1).to(torch.int32))

    @classmethod
    def padded(cls, mask: Tensor) -> Segments:
        """Build segments from a padding mask: one sequence per batch row, padded on the left, right or both sides.

        Args:
            mask: `[B, T]`, of any dtype, nonzero (or True) at tokens and 0 at padding.

        Raises:
            ArgumentError: it is not a tensor `[B, T]`, or has padding between two tokens of a row.
            RuntimeError: it has such padding, and its values cannot be read here. A GPU reports it at the next
                synchronization.
        """
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            problem = f"has shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
            raise ArgumentError("mask", problem=problem, expected="a tensor [B, T]")
        mask = mask != 0
        count = mask.sum(1)
        start = mask.int().argmax(1) if mask.shape[1] else count
        position = torch.arange(mask.shape[1], device=mask.device)
        has_gap = (((position >= start[:, None]) & (position < (start + count)[:, None])) != mask).any(1)
        if can_check_values(mask):
            if bool(has_gap.any()):
                problem, expected = f"has a gap in row {int(has_gap.int().argmax())}", "one run of tokens in each row"
                raise ArgumentError("mask", problem=problem, expected=expected)
        elif torch.compiler.is_compiling() or not in_transform():
            torch._assert_async(has_gap.any().logical_not(), "`mask` has padding between two tokens of a row")
        row = torch.arange(mask.shape[0], device=mask.device)
        return segments_without_checks(torch.stack([row, start, start + count], dim=1).to(torch.int32))

    @classmethod
    def whole(cls, batch: int, length: int, device: torch.device | str | None = None) -> Segments:
        """Build segments in which every batch row is one sequence, as `segments=None` means."""
        row = torch.arange(batch, device=device)
        return segments_without_checks(
            torch.stack([row, torch.zeros_like(row), torch.full_like(row, length)], dim=1).to(torch.int32)
        )

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Number of sequences, N."""
        return self.rows.shape[0]

    def cpu(self) -> Segments:
        """Return the same runs on the CPU. The values of runs that were on a GPU are checked."""
        return self if self.rows.is_cpu else Segments(self.rows.cpu())

    def segment_ids(self, batch: int, length: int) -> Tensor:
        """Return the index of the sequence of each token, int64 `[B, T]`; -1 for tokens outside every run.

        Complexity: O(B T log N), without a synchronisation.

        Args:
            batch: B.
            length: T.
        """
        token = torch.arange(batch * length, device=self.rows.device)
        if self.count == 0:
            return torch.full_like(token, -1).view(batch, length)
        row, start, stop = self.rows.long().unbind(1)
        begin = torch.where(
            stop > start, row * length + start, batch * length
        )  # empty runs hold no token; sort them last
        order = begin.argsort()
        segment_ids = order[(torch.searchsorted(begin[order], token, right=True) - 1).clamp(min=0)]
        inside = (token >= begin[segment_ids]) & (token < row[segment_ids] * length + stop[segment_ids])
        return torch.where(inside, segment_ids, -1).view(batch, length)

    def tiles(self, batch: int, length: int, size: int) -> Tiles:
        """Split the runs into tiles of at most `size` tokens, none of which spans two runs.

        Complexity: O(P) for P = B T // size + N tiles, without a synchronisation.

        Args:
            batch: B.
            length: T.
            size: most tokens of a tile.
        """
        if self.count == 0:
            empty = self.rows.new_zeros(0, dtype=torch.int64)
            return Tiles(empty, empty, empty, empty.bool(), empty)
        row, start, stop = self.rows.long().unbind(1)
        tiles = (stop - start + size - 1) // size
        ends = tiles.cumsum(0)
        index = torch.arange(batch * length // size + self.count, device=self.rows.device)
        sequence = torch.searchsorted(ends, index, right=True)
        used = sequence < self.count
        segment_ids = sequence.clamp(max=self.count - 1)
        within = index - (ends - tiles)[segment_ids]
        begin = start[segment_ids] + within * size
        return Tiles(
            sequence=torch.where(used, segment_ids, 0),
            token=torch.where(used, row[segment_ids] * length + begin, 0),
            count=torch.where(used, (stop[segment_ids] - begin).clamp(max=size), 0),
            first=used & (within == 0),
            last=torch.where(tiles > 0, ends - 1, -1),
        )


def segments_without_checks(rows: Tensor) -> Segments:
    """Build segments from int32 `[N, 3]` rows that are known to be valid; for kernels and caches."""
    return Segments._make((rows,))


def of_tokens(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Return the value of the sequence of each token, `[B, T]`; 0 for tokens outside every run.

    Args:
        values: `[N]`, one value per sequence. N may be 0.
        segment_ids: `[B, T]`, see `Segments.segment_ids`.
    """
    return pad(values, (0, 1))[segment_ids]  # index -1 is the last value


def mask_outside(x: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Set tokens that belong to no sequence to 0, even if they contain NaN.

    Args:
        x: `[B, T, D]`.
        segment_ids: `[B, T]`, sequence of each token, -1 for none; `None` returns `x`.
    """
    return x if segment_ids is None else torch.where((segment_ids >= 0)[..., None], x, 0)


def _check_int32(name: str, x: Tensor) -> None:
    """Check that values fit int32, if they may be read here."""
    if can_check_values(x) and x.numel() and int(x.max()) > MAX_INT:
        raise ArgumentError(name, problem=f"has a maximum of {int(x.max())}", expected=f"values of at most {MAX_INT}")


def _check(self: Segments, rows: Tensor) -> None:
    if not isinstance(rows, Tensor):
        if isinstance(rows, list | tuple | dict | str | float) or hasattr(rows, "__array__"):
            raise ArgumentError("segments", got=f"a {type(rows).__name__}", expected="an int32 tensor [N, 3]")
        return  # a placeholder of `torch.func.vmap`; ops check again
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype != torch.int32:
        raise ArgumentError(
            "segments", problem=f"has dtype {rows.dtype} and shape {list(rows.shape)}", expected="int32 [N, 3]"
        )
    if not can_check_values(rows) or rows.numel() == 0:
        return
    batch, start, stop = rows.long().unbind(1)
    if bool((rows < 0).any()) or bool((stop < start).any()):
        raise ArgumentError(
            "segments", got=rows.tolist(), expected="rows (batch row, start, stop) with 0 <= start <= stop"
        )
    order = torch.argsort(start, stable=True)
    order = order[torch.argsort(batch[order], stable=True)]
    order = order[(stop > start)[order]]
    later, earlier = order[1:], order[:-1]
    if bool(((batch[later] == batch[earlier]) & (start[later] < stop[earlier])).any()):
        raise ArgumentError("segments", got=rows.tolist(), expected="runs that do not overlap")


torch.serialization.add_safe_globals([Segments])
Segments.__init__ = _check  # pyright: ignore[reportAttributeAccessIssue] # a NamedTuple cannot define it in its body


class Tiles(NamedTuple):
    """Runs split into P tiles; the tiles of a run are consecutive and in order.

    P is an upper bound known without reading values; unused tiles come last.

    Attributes:
        sequence: int64 `[P]`, sequence of each tile (0 if unused).
        token: int64 `[P]`, index of its first token in the flattened batch `[B * T]` (0 if unused).
        count: int64 `[P]`, number of its tokens (0 if unused).
        first: bool `[P]`, whether it is the first tile of its run.
        last: int64 `[N]`, index of each run's last tile (-1 if the run is empty).
    """

    sequence: Tensor
    token: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    first: Tensor
    last: Tensor


def check_segments(segments: Segments | None, batch: int, length: int, device: torch.device) -> int:
    """Check that segments fit a batch of `batch` rows and `length` tokens, and return the number of sequences.

    Without segments each batch row is one sequence.

    Args:
        segments: the segments, or `None`.
        batch: B.
        length: T.
        device: device that their rows must be on.

    Raises:
        ArgumentError: `segments` is not a `Segments`, is on another device, or exceeds the batch.
    """
    if segments is None:
        return batch
    if not isinstance(segments, Segments):
        raise ArgumentError("segments", got=f"a {type(segments).__name__}", expected="kalmix.Segments")
    rows = segments.rows
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != 3:
        problem = f"has shape {list(rows.shape)}" if isinstance(rows, Tensor) else f"is a {type(rows).__name__}"
        raise ArgumentError("segments.rows", problem=problem, expected="an int32 tensor [N, 3]")
    check_dtype_and_device("segments", rows, (torch.int32,), device)
    if can_check_values(rows) and rows.shape[0]:
        minimum, (row, _, stop) = (bound.tolist() for bound in rows.aminmax(dim=0))
        if min(minimum) < 0 or row >= batch or stop > length:
            raise ArgumentError(
                "segments",
                problem=f"extends to batch row {row} and token {stop}",
                expected=f"rows below {batch} and at most {length} tokens",
            )
    return rows.shape[0]


def check_times(
    times: Tensor,
    past: tuple[Tensor, Tensor],
    segments: Segments | None,
    sizes: dict[str, int],
    device: torch.device,
) -> None:
    """Check the times of tokens.

    Args:
        times: `[B, T]`, time of each token.
        past: times and positions of earlier tokens of each sequence, `[N, S]` each; a negative position means no token.
        segments: runs of tokens that form sequences, or `None`.
        sizes: B and T.
        device: device that the times must be on.

    Raises:
        ArgumentError: times have another shape, dtype or device; or, where values are checked, they decrease in a
            sequence, begin before its past, or are not finite.
    """
    check_shape("times", times, "B T", sizes)
    check_dtype_and_device("times", times, TIME_DTYPES, device)
    check_range("times", times)
    if can_check_values(times) and times.numel() and _times_decrease(times.detach().double(), past, segments):
        raise ArgumentError(
            "times", problem="decreases", expected="non-decreasing times in each sequence, belief included"
        )


def _times_decrease(times: Tensor, past: tuple[Tensor, Tensor], segments: Segments | None) -> bool:
    """Return whether times decrease within a sequence, or begin before its past."""
    batch, length = times.shape
    segments = Segments.whole(batch, length, times.device) if segments is None else segments
    segment_ids = segments.segment_ids(batch, length)
    decreasing = (times.diff(dim=1) < 0) & (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    nonempty = segments.rows[:, 2] > segments.rows[:, 1]
    row, start, _ = segments.rows[nonempty].long().unbind(1)
    past_times, positions = (x.detach()[nonempty] for x in past)
    before_past = (positions >= 0) & (past_times > times[row, start][:, None])
    return bool(decreasing.any()) or bool(before_past.any())
