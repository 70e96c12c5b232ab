"""Base class of layers that filter trajectories in continuous time: projections, residual, prediction, output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kalmix.beliefs import HistoryBelief
from kalmix.distributed.tensor_parallel import ADDED, Plan, Split, check_divides
from kalmix.errors import ArgumentError
from kalmix.layers.base import Mixer, check_state
from kalmix.layers.head_sizes import Heads
from kalmix.layers.modules import linear_variance, rotate_pairs, sample_gaussian, to_state_dtype
from kalmix.layers.parametrize import StateDynamics
from kalmix.layers.robust_weights import ConfidenceGate, PredictionGate
from kalmix.ops import Dynamics, kappa
from kalmix.segments import Segments, mask_outside
from kalmix.types import Belief, Filtered, belief_dtype, without_autocast
from kalmix.validation import FLOATS, check_choice, check_dtype_and_device, check_range, check_shape

PREDICTIONS = ("step", "gate")


def complex_heads(hidden_size: int, heads: int | None, head_dim: int | None) -> Heads:
    """Return sizes of H heads with C complex channels; by default C <= 64 and 2 H C is about D. See `Heads.of`."""
    return Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=1.0, share=0.5, max_width=64)


def trajectory_plan(layer: Mixer, sizes: Heads, ranks: int) -> Plan:
    """Return how ranks divide the parameters of a layer with `in_proj` to q, k and v, and one row or more per head."""
    check_divides(layer, "heads", sizes.heads, ranks)
    columns = 2 * sizes.keys
    plan: Plan = {name: Split(0, (len(x),)) for name, x in layer.named_parameters()}
    plan |= {name: Split(0, (columns,) * 3) for name in plan if name.startswith("in_proj.")}
    return plan | {"out_proj.weight": Split(1, (columns,)), "out_proj.bias": ADDED}


class StateTransition(NamedTuple):
    """Transition of a complex state over a time lag: decay, rotation and added noise.

    Attributes:
        decay: `[..., H, 1]`.
        rotation: cosine and sine of the angle, `[..., H, C]` each.
        noise: `[..., H, 1]`, variance of the accumulated process noise; 0 if it is not requested.
    """

    decay: Tensor
    rotation: tuple[Tensor, Tensor]
    noise: Tensor | float

    @classmethod
    def of(cls, dynamics: Dynamics, lag: Tensor | None, noise: bool = True) -> StateTransition:
        """Return the transition over lags `[...]`, by default 1, under the dynamics of all heads.

        Its noise is computed if requested.
        """
        angle = dynamics.frequency if lag is None else dynamics.frequency * lag[..., None, None]
        decay = (dynamics.log_decay if lag is None else dynamics.log_decay * lag[..., None]).exp()
        if not noise:
            return cls(decay[..., None], (angle.cos(), angle.sin()), 0.0)
        lag = torch.ones_like(decay[0]) if lag is None else lag
        accumulated = dynamics.process_noise * kappa(-dynamics.log_decay, lag[..., None])
        return cls(decay[..., None], (angle.cos(), angle.sin()), accumulated[..., None])

    def __call__(self, state: Tensor) -> Tensor:
        """Return the decayed and rotated state `[..., H, 2 C]`, without noise."""
        return self.decay * rotate_pairs(state, *self.rotation)


class TrajectoryLayer(Mixer):
    """Base class of layers whose tokens are noisy observations of complex states that decay, rotate and diffuse.

        q, k, v = project(x);   z = estimate(q, k, v);   z = (1 - g) v + g z
        y = out(e^{(-a + i w) horizon} z)

    There are H heads with C complex channels, stored as the C real parts, then the C imaginary parts. Projections have
    biases; these also cover a constant drift, a delay and a bias of the measurements (sections 3.9 and 3.10 of the
    paper). A subclass implements `estimate`, and may override `mix_residual` and `predict_state`.

    The read-out is the predicted state. Its variance is that of a real or imaginary part, half of the complex one.

    Args:
        hidden_size: D.
        sizes: heads with `key_width` complex channels.
        rotary_base: base of the initial frequencies; see `StateDynamics`.
        parts: shape of the noises of one head; see `StateDynamics`.
        predict: "step" predicts one step ahead; "gate" mixes prediction and estimate (`PredictionGate`); `None` returns
            the estimate.
        confidence: whether to weight the estimate by `ConfidenceGate`.
        kernel: name of a kernel of the op; by default chosen by device, dtype and shape.
        initial: initial rates and noises; see `StateDynamics`.
    """

    state_type: ClassVar[type] = HistoryBelief  # type of the layer's state
    window: int | None = None  # number of tokens that a query attends to; `None` for all

    def __init__(
        self,
        hidden_size: int,
        sizes: Heads,
        *,
        rotary_base: float = 10000.0,
        parts: tuple[int, ...] = (),
        predict: str | None = "step",
        confidence: bool = False,
        kernel: str | None = None,
        initial: str = "filter",
    ) -> None:
        super().__init__(hidden_size)
        if predict is not None:
            check_choice("predict", predict, PREDICTIONS)
        self.sizes = sizes
        self.predict = predict
        self.kernel = kernel
        columns = 2 * sizes.keys
        self.in_proj: nn.Linear = nn.Linear(hidden_size, 3 * columns)
        self.dynamics: StateDynamics = StateDynamics(sizes.heads, sizes.key_width, rotary_base, parts, initial)
        self.residual: nn.Parameter = nn.Parameter(torch.empty(sizes.heads))
        self.confidence: ConfidenceGate | None = ConfidenceGate(sizes.heads) if confidence else None
        self.prediction_gate: PredictionGate | None = (
            PredictionGate(sizes.heads, sizes.key_width) if predict == "gate" else None
        )
        self.out_proj: nn.Linear = nn.Linear(columns, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight of the estimate in the residual to 0.5."""
        nn.init.zeros_(self.residual)

    def head_plan(self, ranks: int) -> Plan:
        """Return how ranks divide the parameters: by heads."""
        return trajectory_plan(self, self.sizes, ranks)

    @abstractmethod
    def estimate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        variance: bool,
        belief: Any,
        segments: Segments | None,
        times: Tensor | None,
    ) -> tuple[Filtered, Dynamics]:
        """Estimate the state at each token from q, k and v `[B, T, H, 2 C]`, as `kalmix.ops.attend` does.

        Return the estimates, and the dynamics of the estimated states.
        """

    def state_dynamics(self, dtype: torch.dtype) -> Dynamics:
        """Return the dynamics of the estimated states."""
        return self.dynamics(dtype)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of tokens `[B, T, D]`, each `[B, T, H, 2 C]`."""
        q, k, v = (part.unflatten(-1, (self.sizes.heads, -1)) for part in self.in_proj(x).chunk(3, -1))
        return q, k, v

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Return rates, steps, frequencies and noises."""
        return self.dynamics.parameters()

    def read(
        self,
        x: Tensor,
        state: Belief | None = None,
        segments: Segments | None = None,
        variance: bool = False,
        times: Tensor | None = None,
        horizon: Tensor | None = None,
    ) -> tuple[Filtered, Tensor | None]:
        """Predict the state after each token.

        Args:
            x: tokens `[B, T, D]`.
            state: state to continue from; the prior by default.
            segments: runs of tokens that form sequences; by default each batch row is one sequence.
            variance: also return the variance.
            times: `[B, T]`, time of each token, non-decreasing in a sequence, in float64, float32, int64 or int32.
                Default: 0, 1, 2, ... in each sequence, or from the last time of the state plus 1.
            horizon: `[B, T]` >= 0, time from each token to the time of its prediction, in a dtype of `times`, bfloat16
                or float16; 1 by default.

        Returns:
            A pair. First, `Filtered` with mean and variance `[B, T, 2 H C]`, independent between columns, and the new
            state; second, the sequence of each token, or `None` without segments.
        """
        previous = check_state(state, self.state_type, x, segments)
        if horizon is not None:
            check_shape("horizon", horizon, "B T", {"B": x.shape[0], "T": x.shape[1]})
            check_dtype_and_device("horizon", horizon, (*FLOATS, torch.int64, torch.int32), x.device)
            check_range("horizon", horizon, minimum=0.0)
        segment_ids = None if segments is None else segments.segment_ids(*x.shape[:2])
        q, k, v = self.project(mask_outside(x, segment_ids))
        with without_autocast(x.device):
            needs_variance = variance or self.confidence is not None
            filtered, dynamics = self.estimate(q, k, v, needs_variance, previous, segments, times)
            mean, state_variance = self.predict_state(*self.mix_residual(filtered, v), v, horizon, dynamics)
        mean = mask_outside(mean.flatten(2), segment_ids)
        if not variance or state_variance is None:
            return Filtered(mean, None, filtered.belief), segment_ids
        half = (state_variance / 2).expand(*v.shape[:3], self.sizes.key_width)
        spread = mask_outside(torch.cat([half, half], -1).flatten(2), segment_ids)
        return Filtered(mean, spread, filtered.belief), segment_ids

    def state_size(self, length: int) -> int:
        """Return the number of elements of keys, values and times of the stored tokens."""
        tokens = length if self.window is None else min(length, self.window)
        return tokens * (4 * self.sizes.keys + 1)

    def attention_map(self, x: Tensor, times: Tensor | None = None) -> Tensor | None:
        """Return the weight of each token in each estimate, decay included; see `Mixer.attention_map`.

        Args:
            x: tokens `[B, T, D]`.
            times: `[B, T]`, time of each token; 0, 1, 2, ... by default.
        """
        return None

    def mix_residual(self, filtered: Filtered, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mix the estimate with the token's own value: z = (1 - g) v + g estimate.

        The own value is treated as known, so the variance is that of the estimate's share.

        Returns:
            The mixed estimate `[B, T, H, 2 C]`, and its complex variance `[B, T, H, 1 or C]` (or `None`).
        """
        estimate_weight = torch.sigmoid(self.residual.to(belief_dtype(v.dtype)))[:, None]
        value_weight, state_variance = 1 - estimate_weight, filtered.variance
        if state_variance is not None:
            state_variance = state_variance[..., : self.sizes.key_width]  # imaginary parts have the same variance
            if self.confidence is not None:
                estimate_weight = estimate_weight * self.confidence(state_variance)
            state_variance = estimate_weight.square() * state_variance
        return value_weight * to_state_dtype(v) + estimate_weight * to_state_dtype(filtered.mean), state_variance

    def predict_state(
        self,
        estimate: Tensor,
        state_variance: Tensor | None,
        v: Tensor,
        horizon: Tensor | None,
        dynamics: Dynamics,
    ) -> tuple[Tensor, Tensor | None]:
        """Predict the state `horizon` after each token.

        Args:
            estimate: `[B, T, H, 2 C]`.
            state_variance: its complex variance `[B, T, H, 1 or C]`, or `None`.
            v: the tokens' own values `[B, T, H, 2 C]`.
            horizon: `[B, T]`; 1 by default.
            dynamics: dynamics of the states.

        Returns:
            The predicted state in the dtype of `v`, and its complex variance.
        """
        dtype = estimate.dtype
        if self.predict is None:
            return estimate.to(v.dtype), state_variance
        lag = None if horizon is None else horizon.to(dtype)
        transition = StateTransition.of(dynamics, lag, noise=state_variance is not None)
        predicted = transition(estimate)
        if self.prediction_gate is None:
            if state_variance is not None:
                state_variance = transition.decay.square() * state_variance + transition.noise
            return predicted.to(v.dtype), state_variance
        gate, (cos, sin) = self.prediction_gate(estimate, to_state_dtype(v)), transition.rotation
        mean = estimate + torch.cat([gate, gate], -1) * (predicted - estimate)
        if state_variance is not None:
            step = gate * transition.decay
            squared_gain = (1 - gate + step * cos).square() + (step * sin).square()
            state_variance = squared_gain * state_variance + gate.square() * transition.noise
        return mean.to(v.dtype), state_variance

    def project_out(self, readout: Tensor, context: Tensor | None) -> Tensor:
        """Apply the output projection; set tokens outside every sequence to 0."""
        return mask_outside(self.out_proj(readout), context)

    def project_out_variance(self, variance: Tensor, context: Tensor | None) -> Tensor:
        """Propagate the variance through the output projection; exact, since columns are independent."""
        with without_autocast(variance.device):
            return linear_variance(self.out_proj, variance)

    def predict_from_token(self, x: Tensor, horizon: Tensor) -> Tensor:
        """Predict the output `[B, T, D]` at `horizon` `[B, T]` after each token, from that token only."""
        v = to_state_dtype(self.project(x)[2])
        transition = StateTransition.of(self.state_dynamics(v.dtype), horizon.to(v.dtype), noise=False)
        return self.out_proj(transition(v).flatten(2).to(x.dtype))

    def sample(
        self,
        x: Tensor,
        state: Belief | None = None,
        segments: Segments | None = None,
        *,
        count: int = 1,
        **timing: Tensor | None,
    ) -> Tensor:
        """Draw samples of the next observation: the predicted state plus measurement noise (appendix B.1).

        If the residual takes the whole estimate, the complex variance is e^{-2 a horizon} / precision + process_noise
        kappa + key_noise; half of it belongs to real and half to imaginary parts.

        Args:
            x: tokens `[B, T, D]`.
            state: state to continue from; the prior by default.
            segments: runs of tokens that form sequences; by default each batch row is one sequence.
            count: number of samples.
            timing: `times` and `horizon`; see `read`.

        Returns:
            `[count, B, T, D]`.

        Raises:
            ArgumentError: the layer has no posterior.
        """
        if not self.has_posterior:
            problem = f"is not available for {type(self).__name__}"
            raise ArgumentError("sample", problem=problem, expected="a layer with a posterior")
        (mean, variance, _), context = self.read(x, state, segments, True, **timing)
        assert variance is not None
        noise = self.state_dynamics(variance.dtype).key_noise.repeat_interleave(2 * self.sizes.key_width) / 2
        shape = (count, *mean.shape)
        moments = mean.expand(shape), (variance + noise).expand(shape)
        return self.project_out(sample_gaussian(*moments, self.tensor_parallel), context)
