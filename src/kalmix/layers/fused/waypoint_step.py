"""Control towards waypoints in a step of `ControlledFilter`, in one kernel."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kalmix.layers.fused.trajectory_step import can_fuse_step
from kalmix.ops._shared.custom_op import with_launch_cache

MAX_TILE = 65536  # elements of a matrix of the map to waypoints that one program holds


class WaypointMap(NamedTuple):
    """Parameters of `WaypointControl` for H heads of C channels and a map of rank R.

    Attributes:
        down: `[R, 2 H C]`.
        up: `[2 H C, R]`.
        log_weight: `[H, C]`; `positive` maps it to the weight c.
    """

    down: Tensor
    up: Tensor
    log_weight: Tensor


def can_fuse_control(x: Tensor, control: WaypointMap, parameters: tuple[Tensor, ...]) -> bool:
    """Return whether `steer_step` and `predict_step` accept tokens `x` and these parameters, without gradients."""
    rank, columns = control.down.shape
    fits = (1 << (rank - 1).bit_length()) * (1 << (columns - 1).bit_length()) <= MAX_TILE
    return fits and can_fuse_step(x, (*control, *parameters))


def steer_step(predicted: Tensor, control: WaypointMap, log_decay: Tensor) -> Tensor:
    """Steer the predicted states of one token per row towards their waypoints, over one unit of time.

        result = predicted + beta (up down predicted - predicted),   beta = c g / (1 + c g)
        g = (1 - e^{-2 a}) / (2 a),   a = -log_decay

    Args:
        predicted: `[B, 1, H, 2 C]`, contiguous.
        control: parameters of the map and weights c of channels.
        log_decay: `[H]`.

    Returns:
        The steered states in the shape and dtype of `predicted`; computed in float32.
    """
    return _steer(predicted, *control, log_decay)


@with_launch_cache
def _steer(predicted: Tensor, down: Tensor, up: Tensor, log_weight: Tensor, log_decay: Tensor) -> Tensor:
    from kalmix.layers.fused.triton.waypoint_step import steer

    return steer(predicted, down, up, log_weight, log_decay)
