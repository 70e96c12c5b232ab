"""Adaptive Filter Attention (AFA): attention as filtering, every token pulled forward to every later one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor, nn

from kalmix import designs, ops
from kalmix.beliefs import HistoryBelief
from kalmix.designs import Design
from kalmix.layers.modules import l2_normalize, to_state_dtype
from kalmix.layers.parametrize import StateDynamics
from kalmix.layers.robust_weights import RobustWeights
from kalmix.layers.trajectory_base import TrajectoryLayer, complex_heads
from kalmix.ops import Dynamics, Weight
from kalmix.segments import Segments
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import check_choice, check_positive_int


class AdaptiveFilterAttention(TrajectoryLayer):
    """Adaptive Filter Attention (Racioppo, arXiv:2509.04154), Algorithm 1 with its misprints mended.

        z_i = sum_j A_ij e^{(-a + i w) (t_i - t_j)} v_j,   A_ij = softmax_j (temperature log(weight_ij / V(t_i - t_j)))

    with V the variance by which the dynamics carry a look at t_j to t_i and weight_ij its robust weight, given how far
    the query at i is from the key carried from j: see `kalmix.ops.attend`, and `TrajectoryLayer` for what follows.

    Its posterior is the one of looks whose errors are independent: exact without process noise and with unit weights,
    else overconfident (docs/results/afa.md says by how much, and how to calibrate it).

    Args:
        hidden_size: D.
        heads, head_dim: heads, and complex channels of each; see `complex_heads`.
        rotary_base: of initial frequencies; see `StateDynamics`.
        iterations: K >= 1, of the reweighted estimate, with shared weights (section 2.4): each but the last moves the
            query towards the estimate of its key, by as much as the residual takes of an estimate.
        value_dynamics: whether values have dynamics and noises of their own.
        weight: "rational" or "exponential".
        window: number of tokens a query sees, itself and the `window` - 1 before it; all if absent.
        floor: whether a learned number >= 0, at first 0.01, is added to the decay of keys.
        normalize: whether queries and keys are unit vectors (section 3.7).
        predict: "step": the state one step ahead, as published; "gate": as much of it as a gate says (section 3.1);
            `None`: the estimate itself.
        confidence: whether a gate of the total precision weighs the estimate (appendix B.2).
        kernel: pin a kernel of `kalmix.ops.attend`.

    Cost: O(K T (S + T) H C) for T tokens after S, and the projections; the state holds every key and value, or those of
    the window.
    """

    design: Design | None = designs.AFA
    has_posterior = True

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        rotary_base: float = 10000.0,
        iterations: int = 1,
        value_dynamics: bool = False,
        weight: str = "rational",
        window: int | None = None,
        floor: bool = False,
        normalize: bool = False,
        predict: str | None = "step",
        confidence: bool = False,
        kernel: str | None = None,
    ) -> None:
        check_positive_int("iterations", iterations)
        check_positive_int("window", 1 if window is None else window)
        check_choice("weight", weight, get_args(Weight))
        sizes = complex_heads(hidden_size, heads, head_dim)
        options = {"rotary_base": rotary_base, "predict": predict, "confidence": confidence, "kernel": kernel}
        super().__init__(hidden_size, sizes, **options)
        heads, channels = sizes.heads, sizes.key_width
        self.iterations = iterations
        self.weight = weight
        self.window = window
        self.normalize = normalize
        self.value_dynamics: StateDynamics | None = (
            StateDynamics(heads, channels, rotary_base) if value_dynamics else None
        )
        self.robust_weights: RobustWeights = RobustWeights(heads, nu=1.0 if normalize else 2.0 * channels, floor=floor)

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Rates, steps, frequencies and noises of keys and values."""
        value_dynamics = () if self.value_dynamics is None else self.value_dynamics.parameters()
        return chain(super().dynamics_parameters(), value_dynamics)

    def state_dynamics(self, dtype: torch.dtype) -> Dynamics:
        """The dynamics of values."""
        return (self.dynamics if self.value_dynamics is None else self.value_dynamics)(dtype)

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
        """`kalmix.ops.attend`, after the iterations that move the query."""
        value_dynamics = None if self.value_dynamics is None else self.value_dynamics(belief_dtype(v.dtype))
        return self._attend(q, k, v, value_dynamics, variance, belief, segments, times)

    def attention_map(self, x: Tensor, times: Tensor | None = None) -> Tensor:
        """Return a map for each head: tokens are their own values here, in T channels that do not turn."""
        q, k, _ = self.project(x)
        length, heads = x.shape[1], self.sizes.heads
        value_dynamics = self.state_dynamics(belief_dtype(x.dtype))._replace(
            frequency=to_state_dtype(q).new_zeros(heads, length)
        )
        identity = torch.eye(length, 2 * length, dtype=q.dtype, device=q.device)[:, None]
        v = identity.expand(x.shape[0], length, heads, 2 * length)
        return self._attend(q, k, v, value_dynamics, times=times).mean[..., :length].transpose(1, 2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        value_dynamics: Dynamics | None,
        variance: bool = False,
        belief: HistoryBelief | None = None,
        segments: Segments | None = None,
        times: Tensor | None = None,
    ) -> Filtered:
        dtype = belief_dtype(q.dtype)
        q, k = (l2_normalize(q), l2_normalize(k)) if self.normalize else (q, k)
        arguments: dict[str, Any] = self.dynamics(dtype)._asdict() | self.robust_weights(dtype)
        arguments |= {"weight": self.weight, "window": self.window, "kernel": self.kernel}
        step = torch.sigmoid(self.residual.to(dtype))[:, None]
        for _ in range(self.iterations - 1):
            key_history = None if belief is None else belief._replace(values=belief.keys)
            key_estimate = ops.attend(q, k, k, belief=key_history, times=times, segments=segments, **arguments).mean
            q = (q + step * (key_estimate - q)).to(q.dtype)
        arguments |= {"value_dynamics": value_dynamics, "variance": variance}
        return ops.attend(q, k, v, belief=belief, times=times, segments=segments, **arguments)
