"""Recurrent Adaptive Filter Attention: a robust Kalman filter with a state of constant size."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalmix.beliefs import detach, loadable, take
from kalmix.layers.base import check_state_tensor
from kalmix.layers.fused.dispatch import uses_triton
from kalmix.layers.fused.robust_filter import register_robust_filter
from kalmix.layers.modules import to_state_dtype
from kalmix.layers.robust_weights import RobustWeights
from kalmix.layers.trajectory_base import StateTransition, TrajectoryLayer, complex_heads
from kalmix.ops import Dynamics, recomputed_op, run_steps
from kalmix.segments import Segments, check_times
from kalmix.types import Filtered, belief_dtype, dependent_zero, replace_fields
from kalmix.validation import check_positive_int, check_range

MAX_TRITON_WIDTH = 1024  # columns of a head that one program holds


@loadable
class RecurrentAFAState(NamedTuple):
    """State of a `RecurrentFilterAttention`: N sequences after their last token.

    A layer checks the fields and raises `ArgumentError`; this class does not. H is the number of heads, C that of
    complex channels per head. All fields are 0 before the first token; a precision of 0 marks this, and the time is
    then not used.

    Attributes:
        mean: `[N, 2, H, 2 C]`, the state z of the layer: z_k, observed by keys (index 0), and z_v, observed by values
            (index 1): C real parts, then C imaginary parts. In float32 (float64 if the inputs are float64).
        precision: `[N, 1, H, 1]`, one number >= 0 per head, the same for its C channels and for z_k and z_v, in the
            dtype of `mean`: 1 / E|error|^2, where E|error|^2 is the variance of a complex channel, real plus imaginary
            part.
        time: float64 `[N, 1, 1, 1]`, time of the last token.

    Example:
        >>> from kalmix.layers import RecurrentFilterAttention
        >>> _, state = RecurrentFilterAttention(64, heads=4)(torch.randn(3, 16, 64))
        >>> state.mean.shape, state.precision.shape, state.time[0].item()
        (torch.Size([3, 2, 4, 16]), torch.Size([3, 1, 4, 1]), 15.0)
    """

    mean: Tensor
    precision: Tensor
    time: Tensor

    take = take
    detach = detach

    def to(self, *args: Any, **kwargs: Any) -> RecurrentAFAState:
        """Apply `Tensor.to` to mean and precision; times change device only, not dtype."""
        mean, precision = (x.to(*args, **kwargs) for x in self[:2])
        return RecurrentAFAState(mean, precision, self.time.to(mean.device))


class RecurrentFilterAttention(TrajectoryLayer):
    """Recurrent form of Adaptive Filter Attention: a robust Kalman filter with a state of constant size.

    Paper: [Attention as an Adaptive Filter](https://arxiv.org/abs/2509.04154), appendix B.4, Algorithm 4.
    Misprints are corrected; docs/layers/notes/recurrent-afa.md lists them.

    The state z = (z_k, z_v) has a part that keys observe and one that values observe, with one precision p = 1 /
    variance for all channels of a head. For each token, a time tau after the one before, the layer predicts z- and p-,
    and sets z = z-:

        z- = e^{(-a + i w) tau} z,   1 / p- = e^{-2 a tau} / p + process_noise (1 - e^{-2 a tau}) / (2 a)

    It then computes `weight`, p and z in `iterations` rounds. `weight` uses the z_k of the round before; z- and p- are
    the same in all rounds:

        weight = (1 + |q - z_k|^2 / ((1 / p- + R) nu))^-temperature
        p = p- + weight / R,   z = z- + step (weight / (p R)) ((k, v) - z-)

    The output is that of the state z_v predicted over `horizon`: y = out(e^{(-a + i w) horizon} z_v).

    R = key_noise + query_noise. Each head learns the decay rate a, the noises, the scale nu of the residual, the
    temperature and the step, between 0 and 1; each channel learns a frequency w. The weight of a token decreases with
    the distance between its query and z_k. The first token of a sequence has p- = 0, weight 1 and step 1. Process
    noise correlates the errors of past tokens; unlike `AdaptiveFilterAttention`, this layer accounts for that. With
    unit weights (nu to infinity) and full steps it is the Kalman filter with a flat prior, and its variance is
    calibrated.

    `layer.filter(x, variance=True)` returns `kalmix.Filtered`: mean (y), variance `[B, T, D]` in float32 (float64 for
    float64 inputs), and belief (the state).

    Args:
        hidden_size: D.
        heads: number of heads, H. Default: D / (2 C), rounded, at least 1.
        head_dim: complex channels per head, C. Default: D / (2 H), rounded down, at least 1, if `heads` is given;
            otherwise the largest power of two that is at most min(D / 4, 64), but at least 2.
        rotary_base: base of the initial frequencies, > 0: with P = C / 2 rounded up, they are plus and minus
            `rotary_base`^(-j / P) radians per unit of time, j = 0 to P - 1.
        iterations: number of times that the weight is computed from the estimate, >= 1.
        predict: "step" predicts the state at `horizon` after the token, as published; "gate" mixes the estimate z_v and
            that prediction by a gate computed from the token; `None` returns z_v and ignores `horizon`.

    Raises:
        ArgumentError: an option has the wrong type or value; or, in a call, an argument has the wrong type, shape,
            dtype or device, x, times or horizon is not finite, times decrease in a sequence, or a horizon is negative.
            Values are checked on the CPU; on a GPU only inside `kalmix.checks()`.
        TypeError: an option or argument has an unknown name.

    Shape:
        In `y, state = layer(x, state=None, segments=None, times=None, horizon=None)`, x and y are `[B, T, D]`, in the
        dtype of the parameters; under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `times` `[B, T]`: time of each token, in any unit, non-decreasing in a sequence; float64, float32, int64 or
        int32. Default: 0, 1, 2, ... in each sequence, or from the last time of `state` plus 1.
        `horizon` `[B, T]` >= 0: time from each token to its prediction, in a dtype of `times`, bfloat16 or
        float16; 1 by default.
        `state` is a `RecurrentAFAState` of 4 H C + H + 1 floats per sequence.

    Complexity: O(iterations T H C), in T sequential steps: on a GPU, of one Triton program per sequence and head. Other
    devices, float64, `torch.func` transforms and second derivatives use PyTorch code.

    Example:
        >>> from kalmix.layers import RecurrentFilterAttention
        >>> y, state = RecurrentFilterAttention(64, heads=4)(torch.randn(3, 16, 64))
        >>> y.shape, state.mean.shape  # mean: 3 sequences, keys and values, 4 heads of 8 complex channels
        (torch.Size([3, 16, 64]), torch.Size([3, 2, 4, 16]))
    """

    has_posterior = True
    state_type = RecurrentAFAState

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        rotary_base: float = 10000.0,
        iterations: int = 1,
        predict: str | None = "step",
    ) -> None:
        check_positive_int("iterations", iterations)
        sizes = complex_heads(hidden_size, heads, head_dim)
        super().__init__(hidden_size, sizes, rotary_base=rotary_base, predict=predict)
        self.iterations = iterations
        self.robust_weights: RobustWeights = RobustWeights(sizes.heads, nu=2.0 * sizes.key_width)

    def reset_parameters(self) -> None:
        """Set the step to 0.98."""
        nn.init.constant_(self.residual, 4.0)

    def state_dynamics(self, dtype: torch.dtype) -> Dynamics:
        """Return the dynamics, with query noise added to key noise."""
        dynamics = self.dynamics(dtype)
        return replace_fields(dynamics, key_noise=dynamics.key_noise + dynamics.query_noise)

    def state_size(self, length: int) -> int:
        """Return the number of elements of two means, a precision per head, and a time."""
        return 4 * self.sizes.keys + self.sizes.heads + 1

    def mix_residual(self, filtered: Filtered, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the estimate unchanged, since the residual is the step of the filter."""
        return to_state_dtype(filtered.mean), filtered.variance

    def estimate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        variance: bool,
        belief: RecurrentAFAState | None,
        segments: Segments | None,
        times: Tensor | None,
    ) -> tuple[Filtered, Dynamics]:
        """Run the filter token by token; see the class."""
        dtype, (batch, length, heads, width) = belief_dtype(v.dtype), v.shape
        count = batch if segments is None else segments.count
        if belief is None:
            zeros = v.new_zeros(count, 2, heads, width, dtype=dtype)
            belief = RecurrentAFAState(zeros, zeros[:, :1, :, :1], v.new_zeros(count, 1, 1, 1, dtype=torch.float64))
        sizes = {"N": count, "I": 2, "H": heads, "C": width, "J": 1}
        check_state_tensor("mean", belief.mean, "N I H C", sizes, (dtype,), v)
        check_state_tensor("precision", belief.precision, "N J H J", sizes, (dtype,), v)
        check_state_tensor("time", belief.time, "N J J J", sizes, (torch.float64,), v)
        for name, tensor in {"q": q, "k": k, "v": v, "state.mean": belief.mean, "state.time": belief.time}.items():
            check_range(name, tensor)
        check_range("state.precision", belief.precision, minimum=0.0)
        if times is not None:
            positions = torch.where(belief.precision[:, 0, :1, 0] > 0, 0, -1)
            check_times(times, (belief.time[:, 0, :, 0], positions), segments, {"B": batch, "T": length}, v.device)
            times = times.detach().double()
        belief = replace_fields(belief, time=belief.time.detach())
        dynamics = self.state_dynamics(dtype)
        parameters = (*dynamics, *self.robust_weights(dtype).values(), self.residual.to(dtype))
        if min(count, batch, length) == 0:
            zero = dependent_zero(q, k, v, *parameters)
            var = v.new_zeros(*v.shape[:3], 1, dtype=dtype) + zero.to(dtype)
            return Filtered(torch.zeros_like(v) + zero.to(v.dtype), var, belief), dynamics
        segment_ids = None if segments is None else segments.segment_ids(batch, length)
        if uses_triton("recurrent_afa", q) and q.dtype == k.dtype == v.dtype and width <= MAX_TRITON_WIDTH:
            log_decay, frequency, process, noise, _, nu, temperature, residual = parameters
            params = torch.stack([-log_decay, process, noise, nu, temperature, residual])
            rows = None if segments is None else segments.rows
            means, variances, *final = _filter(q, k, v, *belief, params, frequency, times, rows, self.iterations)[:5]
            return Filtered(means, variances, RecurrentAFAState(*final)), dynamics
        run = _compiled_op if torch.compiler.is_compiling() else _run_filter
        optional = [x for x in (times, segment_ids) if x is not None]
        options = [self.iterations, times is not None, segment_ids is not None]
        means, variances, *final = run([q, k, v, *belief, *parameters, *optional], options)
        return Filtered(means.to(v.dtype), variances, RecurrentAFAState(*final)), dynamics


def _run_filter(tensors: list[Tensor], options: list[int]) -> list[Tensor]:
    """Run the filter token by token; return means, variances and the final state."""
    iterations, has_times, has_segments = options
    (q, k, v), belief, parameters, optional = tensors[:3], RecurrentAFAState(*tensors[3:6]), tensors[6:14], tensors[14:]
    times, segment_ids = optional[0] if has_times else None, optional[-1] if has_segments else None
    observations = torch.stack([k, v], 2).to(belief.mean.dtype)  # [B, T, 2, H, 2 C]
    token_times = [None] * q.shape[1] if times is None else times[..., None, None, None].unbind(1)
    queries = q.to(belief.mean.dtype)[:, :, None].unbind(1)
    steps = zip(queries, observations.unbind(1), token_times, strict=True)
    readouts, final = run_steps(_Step(*parameters, iterations=iterations), belief, steps, segment_ids)
    return [*readouts, *final]


def _run_filter_fake(tensors, options):
    q, belief = tensors[0], tensors[3:6]
    means, variances = (belief[0].new_empty(*q.shape[:3], width) for width in (q.shape[3], 1))
    return [means, variances, *(x.new_empty(x.shape) for x in belief)]


_compiled_op = recomputed_op("kalmix::recurrent_afa", _run_filter, _run_filter_fake, "`RecurrentFilterAttention`")


_filter = register_robust_filter(_run_filter)


class _Step:
    """One step of the filter, in one dtype."""

    def __init__(self, *parameters: Tensor, iterations: int) -> None:
        *dynamics, nu, temperature, residual = parameters
        self.state_dynamics: Dynamics = Dynamics(*dynamics)
        self.iterations = iterations
        per_head = (self.state_dynamics.key_noise, nu, temperature, torch.sigmoid(residual))
        self.noise, self.nu, self.temperature, self.step = (x[:, None] for x in per_head)
        self.unit_transition: StateTransition = StateTransition.of(
            self.state_dynamics, torch.ones_like(self.noise[0, 0])
        )

    def __call__(
        self, belief: RecurrentAFAState, query: Tensor, observation: Tensor, time_now: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], RecurrentAFAState]:
        mean, precision, time = belief
        observed = precision > 0
        transition = self.unit_transition
        if time_now is None:
            time_now = torch.where(observed[:, :, :1], time + 1, 0)
        else:
            lag = torch.where(observed[:, :, :1], time_now - time, 0).clamp(min=0)  # < 0 outside sequences only
            transition = StateTransition.of(self.state_dynamics, lag[:, :, 0, 0].to(mean.dtype))
        predicted = transition(mean)
        # Precisions instead of variances: 0 before the first token, so nothing is divided by 0.
        prior_precision = torch.where(
            observed, precision / (transition.decay.square() + transition.noise * precision), 0
        )
        innovation_precision = prior_precision / (1 + self.noise * prior_precision)
        step = torch.where(observed, self.step, 1.0)
        estimate, weight = predicted, torch.ones_like(prior_precision)
        for _ in range(self.iterations):
            distance = (query - estimate[:, :1]).square().sum(-1, keepdim=True) * innovation_precision
            weight = (1 + distance / self.nu) ** -self.temperature
            gain = weight / (weight + self.noise * prior_precision)
            estimate = predicted + step * gain * (observation - predicted)
        posterior = prior_precision + weight / self.noise
        return (estimate[:, 1], 1 / posterior[:, 0]), RecurrentAFAState(estimate, posterior, time_now)
