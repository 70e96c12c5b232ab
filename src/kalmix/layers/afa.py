"""Adaptive Filter Attention (AFA): attention as filtering, around the op `attend`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor, nn

from kalmix import designs
from kalmix.beliefs import HistoryBelief
from kalmix.designs import Design
from kalmix.distributed import ops
from kalmix.layers.fused import l2_normalize
from kalmix.layers.fused.trajectory_step import can_fuse_step, predict_step
from kalmix.layers.modules import to_state_dtype
from kalmix.layers.parametrize import StateDynamics
from kalmix.layers.robust_weights import RobustWeights, attend_parameters
from kalmix.layers.trajectory_base import TrajectoryLayer, complex_heads
from kalmix.ops import Dynamics, Weight
from kalmix.segments import Segments
from kalmix.steps import NO_SEQUENCE, Slots
from kalmix.types import Filtered, belief_dtype, replace_fields, without_autocast
from kalmix.validation import check_choice, check_positive_int


class AdaptiveFilterAttention(TrajectoryLayer):
    """Adaptive Filter Attention: attention whose weights come from a filter of decaying, rotating, diffusing states.

    Paper: [Attention as an Adaptive Filter](https://arxiv.org/abs/2509.04154), Algorithm 1. Misprints
    are corrected; the notes on this layer in the documentation list them.

        z_i = sum_j A_ij e^{(-a + i w) (t_i - t_j)} v_j,   A_ij = softmax_j (temperature log(weight_ij / V(t_i - t_j)))
        weight_ij = 1 / (1 + r_ij / nu)  or  e^{-r_ij / nu}
        y_i = out(e^{(-a + i w) horizon_i} ((1 - g) v_i + g z_i))

    j runs over token i and the tokens before it; t_i is the time of token i. Each head learns a decay rate a, a
    temperature, noise variances, nu and the weight g of the estimate z, and for each channel a frequency w. V(tau) is
    the variance of the error with which value j, decayed and rotated over the time tau, predicts the state. r_ij is the
    squared distance between query i and key j after the same decay and rotation, divided by V. See `kalmix.ops.attend`
    for details.

    `layer.filter(x, variance=True)` returns `kalmix.Filtered`: mean (y), variance `[B, T, D]` in float32 (float64 for
    float64 inputs), and belief (the state). The variance treats the errors of tokens as independent and
    v_i as known. `kalmix.ops.attend` names the conditions under which the variance of z is exact.

    Args:
        hidden_size: D.
        heads: number of heads, H. Default: D / (2 C), rounded, at least 1.
        head_dim: complex channels per head, C. Default: D / (2 H), rounded down, at least 1, if `heads` is given;
            otherwise the largest power of two that is at most min(D / 4, 64), but at least 2.
        rotary_base: base of the initial frequencies, > 0: with P = C / 2 rounded up, they are plus and minus
            `rotary_base`^(-j / P) radians per unit of time, j = 0 to P - 1.
        iterations: number of times that attention is computed, with the same parameters, >= 1 (section 2.4). All
            iterations but the last average keys instead of values, and move each query towards that average.
        value_dynamics: whether values have their own dynamics and noises; otherwise they use those of the keys.
        weight: form of weight_ij above, "rational" (the first) or "exponential".
        window: number of tokens that a query attends to, including its own, >= 1; all by default.
        floor: whether to add a learned number per head, >= 0 and initially 0.01, to the factor e^{-a tau} by which keys
            decay in r_ij, so that old keys do not vanish.
        normalize: whether queries and keys are unit vectors (section 3.7).
        predict: "step" predicts the state (1 - g) v + g z at the horizon, as published; "gate" mixes the state and that
            prediction by a gate computed from the token (section 3.1); `None` returns the state and ignores `horizon`.
        confidence: whether z is multiplied by a gate computed from its precision, 1 / variance (appendix B.2).
        initial: start of training. "attention": process noises from 0.1 (first head) to 0.0001 (last head), rates of a
            tenth of them, and a temperature of C (sqrt(8 C) if `normalize`), so that weights depend on content from
            the start; "filter": a rate in [0.001, 0.1], a process noise of 0.1 and a temperature of 1.
        kernel: name of a kernel of `kalmix.ops.attend`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value; or, in a call, x, state, segments, times or horizon has
            the wrong type, shape, dtype or device, x, times or horizon is not finite, times decrease in a sequence, or
            a horizon is negative. Values are checked on the CPU; on a GPU only inside `kalmix.checks()`.
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None, times=None, horizon=None)`, x and y are `[B, T, D]`, in the
        dtype of the parameters; under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `times` `[B, T]` is the time of each token, in float64, float32, int64 or int32, non-decreasing in a sequence.
        Default: one unit per token, from 0 or after the last time of the state.
        `horizon` `[B, T]` >= 0 is the time from each token to that of its output, in a dtype of `times`, bfloat16 or
        float16; 1 by default.
        `state` is a `kalmix.HistoryBelief` of all past tokens, or the newest `window`: keys and values
        `[N, S, H, 2 C]`, in float32 (float64 for float64 inputs).

    Complexity: O(iterations T (S + T) H C) for T tokens after S earlier ones, and the projections.

    Example:
        >>> from kalmix.layers import AdaptiveFilterAttention
        >>> layer = AdaptiveFilterAttention(64, heads=2)
        >>> times = torch.rand(2, 16).cumsum(1)  # irregular
        >>> y, state = layer(torch.randn(2, 16, 64), times=times)
        >>> y.shape, state.keys.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 16, 2, 32]))
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
        initial: str = "filter",
        kernel: str | None = None,
    ) -> None:
        check_positive_int("iterations", iterations)
        check_positive_int("window", 1 if window is None else window)
        check_choice("weight", weight, get_args(Weight))
        sizes = complex_heads(hidden_size, heads, head_dim)
        options = {"rotary_base": rotary_base, "predict": predict, "confidence": confidence, "kernel": kernel}
        super().__init__(hidden_size, sizes, **options, initial=initial)
        heads, channels = sizes.heads, sizes.key_width
        self.iterations = iterations
        self.weight = weight
        self.window = window
        self.normalize = normalize
        self.value_dynamics: StateDynamics | None = (
            StateDynamics(heads, channels, rotary_base, initial=initial) if value_dynamics else None
        )
        temperature = 1.0 if initial == "filter" else (8.0 * channels) ** 0.5 if normalize else float(channels)
        self.robust_weights: RobustWeights = RobustWeights(
            heads, nu=1.0 if normalize else 2.0 * channels, floor=floor, temperature=temperature
        )

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Return rates, steps, frequencies and noises of keys and values."""
        value_dynamics = () if self.value_dynamics is None else self.value_dynamics.parameters()
        return chain(super().dynamics_parameters(), value_dynamics)

    def state_dynamics(self, dtype: torch.dtype) -> Dynamics:
        """Return the dynamics of values. `estimate` computes its own, with all parameters at once."""
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
    ) -> tuple[Filtered, Dynamics]:
        """Estimate the state with `kalmix.ops.attend`."""
        parameters, value_dynamics, state_dynamics = self._attend_parameters(v)
        if self.robust_weights.floor is None:
            parameters.pop("floor", None)  # zeros of the fused part
        options = {"segments": segments, "times": times}
        return self._attend(q, k, v, value_dynamics, variance, belief, parameters, **options), state_dynamics

    def _attend_parameters(self, v: Tensor) -> tuple[dict[str, Tensor], Dynamics | None, Dynamics]:
        """Return the arguments of `attend` that depend on parameters only, and the dynamics of values and of states.

        The dynamics of values are `None` if they are those of keys.
        """
        parameters = attend_parameters(v, self.dynamics, self.robust_weights)
        if self.value_dynamics is None:
            return parameters, None, Dynamics(*(parameters[name] for name in Dynamics._fields))
        value_dynamics = Dynamics(**attend_parameters(v, self.value_dynamics, None))
        return parameters, value_dynamics, value_dynamics

    def read_step(self, x: Tensor, pool: HistoryBelief, slots: Slots) -> tuple[Tensor, None]:
        """Return the read-out `[B, 1, 2 H C]` of one token per row, and no context; update the pool in place.

        Histories of the pool have room for all tokens of a sequence, or for those of the window.
        """
        q, k, v = self.project(x)
        with without_autocast(x.device):
            parameters, value_dynamics, state_dynamics = self._attend_parameters(v)
            filtered = self._attend(q, k, v, value_dynamics, self.confidence is not None, pool, parameters, slots=slots)
            mean = self.predict_fused(filtered.mean, v, state_dynamics)
            if mean is None:
                mean, _ = self.predict_state(*self.mix_residual(filtered, v), v, None, state_dynamics)
        return mean.flatten(2), None

    def predict_fused(self, estimate: Tensor, v: Tensor, dynamics: Dynamics) -> Tensor | None:
        """Return the result of `mix_residual` and `predict_state` in a step; `None` if kernels do not support it.

        Args:
            estimate: estimates of the states, `[B, 1, H, 2 C]`.
            v: the tokens' own values in that shape.
            dynamics: dynamics of the states.
        """
        is_plain = self.confidence is None and self.predict != "gate" and not self.overrides_prediction
        if not is_plain or not can_fuse_step(v, (self.residual, *dynamics)):
            return None
        return predict_step(estimate, v, self.residual, None if self.predict is None else dynamics)

    @property
    def overrides_prediction(self) -> bool:
        """Whether a subclass mixes estimates or predicts states in another way."""
        own, plain = type(self), AdaptiveFilterAttention
        return own.predict_state is not plain.predict_state or own.mix_residual is not plain.mix_residual

    def attention_map(self, x: Tensor, times: Tensor | None = None) -> Tensor:
        """Return a map for each head; see `TrajectoryLayer.attention_map`.

        The values are the columns of the identity, in T channels that do not rotate.
        """
        q, k, _ = self.project(x)
        length, heads = x.shape[1], self.sizes.heads
        value_dynamics = replace_fields(
            self.state_dynamics(belief_dtype(x.dtype)), frequency=to_state_dtype(q).new_zeros(heads, length)
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
        parameters: dict[str, Tensor] | None = None,
        **options: Any,
    ) -> Filtered:
        """Call `kalmix.ops.attend`, after the iterations that move the query.

        Args:
            q, k, v: `[B, T, H, 2 C]` each.
            value_dynamics: dynamics of values, if they are not those of keys.
            variance: also return the variance.
            belief: history to continue, or the pool of a step.
            parameters: dynamics of keys and arguments of the weights, if they are computed already.
            options: times and segments, or the slots of a step.
        """
        dtype = belief_dtype(q.dtype)
        q, k = (l2_normalize(q), l2_normalize(k)) if self.normalize else (q, k)
        arguments: dict[str, Any] = {"weight": self.weight, "window": self.window, "kernel": self.kernel} | options
        arguments |= self.dynamics(dtype)._asdict() | self.robust_weights(dtype) if parameters is None else parameters
        for _ in range(self.iterations - 1):
            key_history = None if belief is None else replace_fields(belief, values=belief.keys)
            if "slots" in options:  # store the token once, in the last iteration
                slots: Slots = options["slots"]
                arguments["slots"] = Slots(slots.read, torch.full_like(slots.write, NO_SEQUENCE))
            key_estimate = ops.attend(q, k, k, belief=key_history, **arguments).mean
            step = torch.sigmoid(self.residual.to(dtype))[:, None]
            q = (q + step * (key_estimate - q)).to(q.dtype)
        arguments |= options | {"value_dynamics": value_dynamics, "variance": variance}
        return ops.attend(q, k, v, belief=belief, **arguments)
