"""Radial-tangential Adaptive Filter Attention: one noise in how long a state is, another in where it points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix import ops
from kalmix.layers.robust_weights import RobustWeights
from kalmix.layers.trajectory_base import TrajectoryLayer, complex_heads
from kalmix.ops import Dynamics
from kalmix.segments import Segments
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import check_positive_int


class RadialTangentialAttention(TrajectoryLayer):
    """Radial-tangential Adaptive Filter Attention (Racioppo, arXiv:2509.04154), Algorithm 2 with its misprints mended.

    What is pulled forward falls into a part along the token's own value and one across it, each with noises, robust
    weights and a softmax of its own; the estimate is a magnitude and a step across the sphere: see
    `kalmix.ops.attend_radial`, and `TrajectoryLayer` for what follows.

    Its posterior has the shortcomings of `AdaptiveFilterAttention`'s. It is each channel's own: that channels err
    together along the direction is left out, and what is added on the way ahead is what all channels get on average.

    Args:
        hidden_size: D.
        heads, head_dim: heads, and complex channels of each; see `complex_heads`.
        rotary_base: of initial frequencies; see `StateDynamics`.
        window: how many tokens a query sees; all if absent.
        predict: "step", "gate" or `None`, as in `AdaptiveFilterAttention`.

    Cost: O(T (S + T) H C) for T tokens after S, in torch, and the projections; the state holds every key and value, or
    those of the window.
    """

    has_posterior = True

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        rotary_base: float = 10000.0,
        window: int | None = None,
        predict: str | None = "step",
    ) -> None:
        check_positive_int("window", 1 if window is None else window)
        sizes = complex_heads(hidden_size, heads, head_dim)
        super().__init__(hidden_size, sizes, rotary_base=rotary_base, parts=(2,), predict=predict)
        self.window = window
        self.robust_weights: RobustWeights = RobustWeights(sizes.heads, nu=(2.0, 2.0 * max(1, sizes.key_width - 1)))

    def state_dynamics(self, dtype: torch.dtype) -> Dynamics:
        """The dynamics, noises as all channels have them on average: one is along the direction, the others across."""
        dynamics = self.dynamics(dtype)
        radial_share = 1 / self.sizes.key_width
        noises = (radial_share * noise[:, 0] + (1 - radial_share) * noise[:, 1] for noise in dynamics[2:])
        return Dynamics(*dynamics[:2], *noises)

    def estimate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        variance: bool,
        belief: Any,
        segments: Segments | None,
        times: Tensor | None,
    ) -> Filtered:
        """`kalmix.ops.attend_radial`."""
        dtype = belief_dtype(q.dtype)
        arguments: dict[str, Any] = self.dynamics(dtype)._asdict() | self.robust_weights(dtype)
        arguments |= {"window": self.window, "variance": variance}
        return ops.attend_radial(q, k, v, belief=belief, segments=segments, times=times, **arguments)
