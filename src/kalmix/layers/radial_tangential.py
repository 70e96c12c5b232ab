"""Radial-tangential Adaptive Filter Attention: separate noises for the magnitude and the direction of a state."""

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
    """Radial-tangential Adaptive Filter Attention: separate noises for the magnitude and the direction of a state.

    Paper: [Attention as an Adaptive Filter](https://arxiv.org/abs/2509.04154), Algorithm 2. Misprints
    are corrected; the notes on this layer in the documentation list them.

    Past values are split into a part along the token's own value and a part across it. Each part has its own noises,
    robust weights and softmax; the estimate combines a magnitude and a step on the sphere. See
    `kalmix.ops.attend_radial`, and `TrajectoryLayer` for residual, prediction and output.

    The variance treats the errors of tokens as independent, like that of `AdaptiveFilterAttention`. It is per channel:
    the correlation of channels along the direction is omitted, and the noise of the prediction is the average over
    channels.

    Args:
        hidden_size: D.
        heads: number of heads, H. Default: D / (2 C), rounded.
        head_dim: complex channels per head, C. Default: D / (2 heads), rounded down, if `heads` is given; otherwise the
            largest power of two that is at most D / 4 and 64.
        rotary_base: base of the initial frequencies; see `StateDynamics`.
        window: number of tokens that a query attends to, including its own; all by default.
        predict: "step" predicts the state one step ahead, as published; "gate" mixes prediction and estimate; `None`
            returns the estimate.

    Raises:
        ArgumentError: an option has the wrong type or value; or, in a call, x, state, segments, times or horizon has
            the wrong type or shape, times decrease in a sequence, or a horizon is negative (values are checked on a
            CPU).

    Shape:
        In `y, state = layer(x, state=None, segments=None, times=None, horizon=None)`, x and y are `[B, T, D]`. `times`
        and `horizon` are `[B, T]`; see `TrajectoryLayer.read`.
        State: 4 H C + 1 floats per token, of at most `window` tokens.

    Complexity: O(T (S + T) H C) for T tokens after S, in PyTorch code, and the projections.

    Example:
        >>> from kalmix.layers import RadialTangentialAttention
        >>> y, state = RadialTangentialAttention(64, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape
        torch.Size([2, 16, 64])
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
        """Return the dynamics, with noises averaged over channels: one is along the direction, the others across it."""
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
        """Call `kalmix.ops.attend_radial`."""
        dtype = belief_dtype(q.dtype)
        arguments: dict[str, Any] = self.dynamics(dtype)._asdict() | self.robust_weights(dtype)
        arguments |= {"window": self.window, "variance": variance}
        return ops.attend_radial(q, k, v, belief=belief, segments=segments, times=times, **arguments)
