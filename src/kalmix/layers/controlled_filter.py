"""Adaptive Filter Attention that steers what it estimates: a planner's waypoints, reached at least cost."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kalmix.layers.afa import AdaptiveFilterAttention
from kalmix.layers.parametrize import positive
from kalmix.ops import kappa
from kalmix.validation import check_positive_int


def waypoint_fraction(rate: Tensor, duration: Tensor, state_weight: Tensor) -> Tensor:
    """The share beta of the way to a waypoint that a mode is taken at least cost (Adaptive Filter Attention, B.5).

    For dx = ((-a + i w) x + b u) dt the controls that minimise q |x(T) - waypoint|^2 + r int |u|^2 end at

        x(T) = (1 - beta) e^{(-a + i w) T} x(0) + beta waypoint
        beta = c g / (1 + c g),   g = (1 - e^{-2 a T}) / (2 a)

    Args:
        rate: a >= 0.
        duration: T >= 0.
        worth: c = q |b|^2 / r >= 0.

    All broadcast.
    """
    weighted = state_weight * kappa(rate, duration)
    return weighted / (1 + weighted)


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
    """The control that ends where `authority` says, b u(t): what is added to dx / dt at time t.

        b u(t) = c / (1 + c g) (waypoint - e^{(-a + i w) T} start) e^{(-a - i w) (T - t)}

    Args:
        start, waypoint: complex states.
        at: t, from 0 to T.
        rate, frequency, duration, worth: a, w, T and c.

    All broadcast.
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
    """Where states should be, a linear map of low rank over all heads, and what it is worth a channel to get there.

    At first that is e^-2: about an eighth of the way in a unit of time.
    """

    def __init__(self, heads: int, channels: int, rank: int) -> None:
        super().__init__()
        columns = 2 * heads * channels
        self.down_proj: nn.Linear = nn.Linear(columns, rank, bias=False)
        self.up_proj: nn.Linear = nn.Linear(rank, columns, bias=False)
        self.log_waypoint_weight: nn.Parameter = nn.Parameter(torch.empty(heads, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initial worth; parts reset themselves."""
        nn.init.constant_(self.log_waypoint_weight, -2.0)

    def forward(self, predicted: Tensor, rate: Tensor, duration: Tensor) -> Tensor:
        """States `[B, T, H, 2 C]` after a duration `[B, T]`, or of one for all, given where they come to by themselves.

        `rate` is `[H]`, of their decay; all are in the dtype of a belief.
        """
        down_proj, up_proj = (part.weight.to(predicted.dtype).mT for part in (self.down_proj, self.up_proj))
        waypoint = (predicted.flatten(2) @ down_proj @ up_proj).view_as(predicted)
        beta = waypoint_fraction(
            rate[:, None], duration[..., None, None], positive(self.log_waypoint_weight.to(predicted.dtype))
        )
        return predicted + torch.cat([beta, beta], -1) * (waypoint - predicted)


class ControlledFilter(AdaptiveFilterAttention):
    """Adaptive Filter Attention whose states are steered on their way: model-predictive control of one step (B.5).

        z' = e^{(-a + i w) ahead} z;   y = out((1 - beta) z' + beta plan(z'))

    The filter says where a state is, its dynamics where it would go, a planner where it should be, and the closed form
    of `authority` how far it pays to go there. What is steered by is known, so the variance is that of a state let go.

    Args:
        hidden_size: D.
        heads, head_dim, rotary_base, window, kernel: as `AdaptiveFilterAttention` has them.
        rank: of the planner.

    Cost: that of `AdaptiveFilterAttention`, and O(T H C rank).
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

    def predict_state(
        self, estimate: Tensor, state_variance: Tensor | None, v: Tensor, horizon: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The state to come, steered, and its complex variance."""
        predicted, state_variance = super().predict_state(estimate, state_variance, v, horizon)
        duration = estimate.new_ones(()) if horizon is None else horizon.to(estimate.dtype)
        steered = self.waypoint_control(
            predicted.to(estimate.dtype), -self.state_dynamics(estimate.dtype).log_decay, duration
        )
        return steered.to(v.dtype), state_variance
