"""Magnitudes and directions in a step of `AFATransformerBlock`: one kernel before the filters, one after them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kalmix.layers.fused.trajectory_step import can_fuse_step
from kalmix.ops._shared.custom_op import with_launch_cache


def can_fuse_polar(x: Tensor, scales: Sequence[Tensor]) -> bool:
    """Return whether `split_step` and `join_step` accept projected tokens `x` and these scales, without gradients."""
    return x.stride(-1) == 1 and can_fuse_step(x, scales)


def split_step(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Split the heads of one token per row into magnitudes and scaled directions.

        m = |x|,   u = scale x / (m + eps)

    Args:
        x: `[B, 1, 3 H 2 C]`: queries, keys and values of H heads, next to each other.
        scale: `[H]`.
        eps: added to magnitudes.

    Returns:
        m `[B, 1, 3 H, 2]`, with 0 in the second column, and u `[B, 1, 3 H, 2 C]`, in the dtype of `x`.
    """
    return _split(x, scale, eps)


def join_step(magnitude: Tensor, direction: Tensor, value: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Join filtered magnitudes and directions of one token per row.

        d = value + direction;   result = magnitude scale d / (|d| + eps)

    Args:
        magnitude: `[B, 1, H, 2]`; the second column has no effect.
        direction: `[B, 1, H, 2 C]`.
        value: the token's own directions in that shape.
        scale: `[H]`.
        eps: added to lengths.

    Returns:
        `[B, 1, 2 H C]` in the dtype of `value`; computed in float32.
    """
    return _join(magnitude, direction, value, scale, eps)


@with_launch_cache
def _split(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from kalmix.layers.fused.triton.polar_step import split

    return split(x, scale, eps)


@with_launch_cache
def _join(magnitude: Tensor, direction: Tensor, value: Tensor, scale: Tensor, eps: float) -> Tensor:
    from kalmix.layers.fused.triton.polar_step import join

    return join(magnitude, direction, value, scale, eps)
