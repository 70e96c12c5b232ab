"""Rotary positions in a step of `RetNet`, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.layers.fused.dispatch import uses_triton
from kalmix.ops._shared.custom_op import needs_grad, with_launch_cache
from kalmix.ops._shared.step import Slots


def can_fuse_rotary(q: Tensor, k: Tensor) -> bool:
    """Return whether `rotary_step` accepts queries and keys `[B, 1, H, W]`, without gradients."""
    heads, width = q.shape[2:]
    return (
        uses_triton("rotary_step", q, (1 << (heads - 1).bit_length()) * (1 << (width - 1).bit_length()))
        and not torch.compiler.is_compiling()
        and q.shape == k.shape
        and q.dtype == k.dtype
        and q.stride(3) == k.stride(3) == 1
        and not needs_grad(q, k)
    )


def rotary_step(q: Tensor, k: Tensor, count: Tensor, slots: Slots, base: float) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys of one token per row by its position, and count the token, in place on a pool.

    The rotation is that of `apply_rotary`. Its angles are in float64.

    Args:
        q: `[B, 1, H, W]`, of even width.
        k: keys of the same shape and dtype.
        count: int64 `[N]`, number of past tokens of N slots: the position of the token; updated in place.
        slots: slots that each row reads and writes; see `kalmix.steps`.
        base: base of the frequencies.

    Returns:
        The rotated queries and keys; 0 in rows of padding.
    """
    return _rotate(q, k, count, *slots, base)


@with_launch_cache
def _rotate(q: Tensor, k: Tensor, count: Tensor, read: Tensor, write: Tensor, base: float) -> tuple[Tensor, Tensor]:
    from kalmix.layers.fused.triton.rotary_step import rotate

    return rotate(q, k, count, read, write, base)
