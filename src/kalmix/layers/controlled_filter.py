"""Adaptive Filter Attention with control: states are steered towards learned waypoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kalmix.distributed.tensor_parallel import Plan
from kalmix.layers.afa import AdaptiveFilterAttention
from kalmix.layers.base import Mixer
from kalmix.layers.fused.trajectory_step import predict_step
from kalmix.layers.fused.waypoint_step import WaypointMap, can_fuse_control, steer_step
from kalmix.layers.modules import apply_linear, is_plain, is_plain_linear
from kalmix.layers.parametrize import positive
from kalmix.ops import Dynamics, kappa
from kalmix.validation import check_positive_int


def waypoint_fraction(rate: Tensor, duration: Tensor, state_weight: Tensor) -> Tensor:
    """Return the fraction beta of the way to a waypoint that optimal control covers (appendix B.5 of the paper).

    For dx = ((-a + i w) x + b u) dt, the control that minimises q |x(T) - waypoint|^2 + r int |u|^2 ends at

        x(T) = (1 - beta) e^{(-a + i w) T} x(0) + beta waypoint
        beta = c g / (1 + c g),   g = (1 - e^{-2 a T}) / (2 a)

    All arguments broadcast.

    Args:
        rate: a >= 0.
        duration: T >= 0.
        state_weight: c = q |b|^2 / r >= 0.
    """
    gain = state_weight * kappa(rate, duration)
    return gain / (1 + gain)


def control(
    start: Tensor,
    waypoint: Tensor,
    time: Tensor,
    *,
    rate: Tensor,
    frequency: Tensor,
    duration: Tensor,
    state_weight: Tensor,
) -> Tensor:
    """Return the optimal control b u(t), the term added to dx / dt at time t; see `waypoint_fraction`.

        b u(t) = c / (1 + c g) (waypoint - e^{(-a + i w) T} start) e^{(-a - i w) (T - t)}

    All arguments broadcast.

    Args:
        start: complex state at time 0.
        waypoint: complex state to reach.
        time: t, from 0 to T.
        rate: a >= 0.
        frequency: w.
        duration: T >= 0.
        state_weight: c >= 0.
    """
    pole = torch.complex(-rate, frequency)
    difference = waypoint - (pole * duration).exp() * start
    return (
        state_weight
        * (1 - waypoint_fraction(rate, duration, state_weight))
        * difference
        * (pole.conj() * (duration - time)).exp()
    )


class WaypointControl(nn.Module):
    """Control towards waypoints: a low-rank linear map of all heads, and a learned weight per channel.

    The weight is initially e^-2, about an eighth of the way per unit of time.

    Args:
        heads: H.
        channels: C, complex channels per head.
        rank: rank of the map.
    """

    def __init__(self, heads: int, channels: int, rank: int) -> None:
        super().__init__()
        columns = 2 * heads * channels
        self.down_proj: nn.Linear = nn.Linear(columns, rank, bias=False)
        self.up_proj: nn.Linear = nn.Linear(rank, columns, bias=False)
        self.log_waypoint_weight: nn.Parameter = nn.Parameter(torch.empty(heads, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weight."""
        nn.init.constant_(self.log_waypoint_weight, -2.0)

    def forward(self, predicted: Tensor, rate: Tensor, duration: Tensor) -> Tensor:
        """Return the controlled states.

        Args:
            predicted: states without control, `[B, T, H, 2 C]`, in the dtype of beliefs.
            rate: their decay rate, `[H]`.
            duration: `[B, T]` or a scalar.
        """
        waypoint = apply_linear(self.up_proj, apply_linear(self.down_proj, predicted.flatten(2))).view_as(predicted)
        beta = waypoint_fraction(
            rate[:, None], duration[..., None, None], positive(self.log_waypoint_weight.to(predicted.dtype))
        )
        return predicted + torch.cat([beta, beta], -1) * (waypoint - predicted)


class ControlledFilter(AdaptiveFilterAttention):
    """Adaptive Filter Attention whose predicted states are steered to learned waypoints by optimal control.

    Paper: [Attention as an Adaptive Filter](https://arxiv.org/abs/2509.04154), appendix B.5.

        z' = e^{(-a + i w) horizon} z;   y = out((1 - beta) z' + beta waypoint(z'))

    `AdaptiveFilterAttention` with default options estimates the state z, and its dynamics predict z'. A waypoint is the
    state that the control aims at, a learned linear map of z' of low rank. beta is between 0 and 1, per channel: the
    share of the way that the best control covers, at a learned ratio of distance to control energy. It grows with the
    horizon; see `waypoint_fraction` in this module.

    `layer.filter(x, variance=True)` returns `kalmix.Filtered`: mean (y), variance `[B, T, D]` in float32 (float64 for
    float64 inputs), and belief (the state). The variance is that of out(z'): the control is treated as
    a known input.

    Args:
        hidden_size: D.
        heads: number of heads, H. Default: D / (2 C), rounded.
        head_dim: complex channels per head, C. Default: D / (2 heads), rounded down, if `heads` is given; otherwise the
            largest power of two that is at most min(D / 4, 64), but at least 2.
        rotary_base: base of the initial frequencies; see `StateDynamics`.
        window: number of tokens that a query attends to, including its own; all by default.
        rank: rank of the map to waypoints.
        kernel: name of a kernel of `kalmix.ops.attend`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value; or, in a call, x, state, segments, times or horizon has
            the wrong type, shape, dtype or device, x, times or horizon is not finite, times decrease in a sequence, or
            a horizon is negative (values are checked on a CPU).
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None, times=None, horizon=None)`, x and y are `[B, T, D]`, in the
        dtype of the parameters; under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `times` `[B, T]` is the time of each token, in float64, float32, int64 or int32, non-decreasing in a sequence.
        Default: one unit per token, from 0 or after the last time of the state.
        `horizon` `[B, T]` >= 0 is the time from each token to that of its output, in these dtypes, bfloat16 or float16;
        1 by default.
        `state` is a `kalmix.HistoryBelief` of all past tokens, or the newest `window`: keys and values
        `[N, S, H, 2 C]`, in float32 (float64 for float64 inputs).

    Complexity: that of `AdaptiveFilterAttention`, plus O(T H C rank).

    Example:
        >>> from kalmix.layers import ControlledFilter
        >>> y, state = ControlledFilter(64, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape
        torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        rotary_base: float = 10000.0,
        window: int | None = None,
        rank: int = 8,
        kernel: str | None = None,
    ) -> None:
        check_positive_int("rank", rank)
        super().__init__(
            hidden_size, heads=heads, head_dim=head_dim, rotary_base=rotary_base, window=window, kernel=kernel
        )
        self.waypoint_control: WaypointControl = WaypointControl(self.sizes.heads, self.sizes.key_width, rank)

    def head_plan(self, ranks: int) -> Plan:
        """Raise `ArgumentError`: waypoints combine all heads."""
        return Mixer.head_plan(self, ranks)

    def predict_state(
        self,
        estimate: Tensor,
        state_variance: Tensor | None,
        v: Tensor,
        horizon: Tensor | None,
        dynamics: Dynamics,
    ) -> tuple[Tensor, Tensor | None]:
        """Predict the state, apply the control, and return it with its complex variance."""
        predicted, state_variance = super().predict_state(estimate, state_variance, v, horizon, dynamics)
        duration = estimate.new_ones(()) if horizon is None else horizon.to(estimate.dtype)
        steered = self.waypoint_control(predicted.to(estimate.dtype), -dynamics.log_decay, duration)
        return steered.to(v.dtype), state_variance

    def predict_fused(self, estimate: Tensor, v: Tensor, dynamics: Dynamics) -> Tensor | None:
        """Predict the states of a step and steer them, in two kernels; see the base class."""
        control = self.waypoint_control
        down, up = control.down_proj, control.up_proj
        own, plain = type(self), ControlledFilter
        inherits = own.predict_state is plain.predict_state and own.mix_residual is plain.mix_residual
        if not inherits or not is_plain(control, WaypointControl) or not all(map(is_plain_linear, (down, up))):
            return None
        waypoints = WaypointMap(down.weight, up.weight, control.log_waypoint_weight)
        if not can_fuse_control(v, waypoints, (self.residual, *dynamics)):
            return None
        return steer_step(predict_step(estimate, v, self.residual, dynamics), waypoints, dynamics.log_decay)
