"""Checks that every op shares."""

from __future__ import annotations

import torch

from kalmix.checks import check_kind, check_values
from kalmix.errors import ArgumentError
from kalmix.segments import Segments


def check_heads(sizes: dict[str, int]) -> None:
    """Value heads must be a multiple of key heads."""
    if sizes["H"] == 0 or sizes["G"] % sizes["H"]:
        raise ArgumentError("v", got=f"of {sizes['G']} heads", needs=f"of a multiple of the {sizes['H']} key heads")


def check_segments(segments: Segments | None, batch: int, length: int, device: torch.device) -> int:
    """Check that segments fit a batch; returns N, the number of sequences."""
    if segments is None:
        return batch
    if not isinstance(segments, Segments):
        raise ArgumentError("segments", got=type(segments).__name__, needs="kalmix.Segments")
    check_kind("segments", segments.rows, (torch.int32,), device)
    if check_values(segments.rows) and segments.count:
        row, _, stop = segments.rows.amax(0).tolist()
        if row >= batch or stop > length:
            raise ArgumentError(
                "segments",
                got=f"up to batch row {row} and token {stop}",
                needs=f"within batch {batch} and length {length}",
            )
    return segments.count
