"""Conversion of unconstrained parameters to signals that a filter accepts: decays <= 0, variances > 0."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.layers.fused import cell_dynamics, positive, softplus_precision, step_decay
from kalmix.layers.fused.cell_dynamics import discretize_ou as discretize_ou
from kalmix.layers.fused.cell_dynamics import discretize_zoh as discretize_zoh
from kalmix.layers.fused.precision import NOISE_FLOOR
from kalmix.layers.fused.trajectory_step import RawDynamics
from kalmix.layers.modules import is_plain, low_rank, to_state_dtype
from kalmix.ops import LEAST_NOISE, Dynamics
from kalmix.validation import check_choice, check_number

DISCRETIZATIONS = ("ou", "zoh")
# Initial value and lower bound of variances that depend on the token (see `NoiseVariance`). The prior variance is 1, so
# with an initial noise of 4 the first tokens do not fill the memory.
VARIANCES = {
    "obs_noise": {"initial": 4.0, "floor": LEAST_NOISE[torch.float32]},
    "write_variance": {"initial": 4.0, "floor": 1e-4},
    "reset": {"initial": 4.0, "floor": 1e-4},
    "process_noise": {"initial": 0.001, "floor": 1e-6},
}
# Initial values and lower bounds for `StateDynamics`, per unit of time and per observation. With them the weight of a
# token halves in about 20 tokens.
STATE_VARIANCES = {
    "process_noise": {"initial": 0.1, "floor": 1e-6},
    "key_noise": {"initial": 1.0, "floor": 1e-4},
    "query_noise": {"initial": 1.0, "floor": 1e-4},
}
DIFFUSIONS = ("variance", "deviation")
STARTS = ("filter", "attention")
# With the start "attention": process noises from the first head to the last, and rates relative to them. With higher
# rates, old keys would decay to zero faster than their variance grows, and get more weight than new ones.
INITIAL_PROCESS_NOISES = (1e-1, 1e-4)
RATE_PER_PROCESS_NOISE = 0.1


def noise_variance(raw: Tensor, floor: float = NOISE_FLOOR) -> Tensor:
    """Return the variance softplus(raw) + floor of a noise, in the dtype of beliefs (Memory by Design, appendix D)."""
    return F.softplus(to_state_dtype(raw)) + floor


def observation_precision(raw: Tensor, floor: float = NOISE_FLOOR) -> Tensor:
    """Return the precision 1 / (softplus(raw) + floor) of an observation, in the dtype of beliefs."""
    return softplus_precision(raw, floor)


class CellDynamics(nn.Module):
    """Learned, time-invariant decay and process noise of every cell (slot, channel).

    Parameters are logarithms (see `positive`), `[slots, channels]` each: of the rate alpha, initially 1; of the step
    dt, initially log-uniform in [0.001, 0.1]; and of the diffusion p, initially 0.01.

    Args:
        slots: number of slots.
        channels: number of channels.
        discretization: "ou" (`discretize_ou`) or "zoh" (`discretize_zoh`).
        process_noise: if False, the process noise is 0 and there is no diffusion parameter.
        diffusion: "variance" if the process noise is proportional to p, or "deviation" if it is to p^2.
    """

    def __init__(
        self,
        slots: int,
        channels: int,
        discretization: str = "ou",
        process_noise: bool = True,
        diffusion: str = "variance",
    ) -> None:
        super().__init__()
        check_choice("discretization", discretization, DISCRETIZATIONS)
        check_choice("diffusion", diffusion, DIFFUSIONS)
        self.discretization = discretization
        self.diffusion = diffusion
        self.log_rate: nn.Parameter = nn.Parameter(torch.empty(slots, channels))
        self.log_step: nn.Parameter = nn.Parameter(torch.empty(slots, channels))
        self.log_diffusion: nn.Parameter | None = nn.Parameter(torch.empty(slots, channels)) if process_noise else None
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Return the sizes and options that `repr` shows."""
        slots, channels = self.log_rate.shape
        return (
            f"slots={slots}, channels={channels}, discretization={self.discretization!r}, diffusion={self.diffusion!r}"
        )

    def reset_parameters(self) -> None:
        """Set the initial values of the paper (appendix G.2)."""
        nn.init.zeros_(self.log_rate)
        nn.init.uniform_(self.log_step, math.log(0.001), math.log(0.1))
        if self.log_diffusion is not None:
            nn.init.constant_(self.log_diffusion, math.log(0.01))

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return log_decay <= 0 and process_noise >= 0, `[slots, channels]` each, in the dtype of beliefs."""
        diffusion = None if self.log_diffusion is None else self.log_diffusion.to(dtype)
        log_decay, noise = cell_dynamics(
            self.log_rate.to(dtype), self.log_step.to(dtype), diffusion, zero_order_hold=self.discretization == "zoh"
        )
        if diffusion is not None and self.diffusion == "deviation":
            noise = noise * positive(diffusion)
        return log_decay, noise


class NoiseVariance(nn.Module):
    """Learned variances that depend on the token: softplus(project(x) + bias) + floor.

    Args:
        hidden_size: D.
        outputs: number of variances per token.
        initial: approximate value before training.
        floor: lower bound.
    """

    def __init__(self, hidden_size: int, outputs: int, *, initial: float, floor: float) -> None:
        super().__init__()
        self.initial = initial
        self.floor = floor
        self.proj: nn.Linear = nn.Linear(hidden_size, outputs, bias=False)
        self.bias: nn.Parameter = nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias so that its softplus is `initial`."""
        nn.init.constant_(self.bias, math.log(math.expm1(self.initial)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the variances `[B, T, outputs]` of tokens `[B, T, D]`, in the dtype of beliefs."""
        return noise_variance(self.proj(x) + self.bias, self.floor)


class StepDynamics(nn.Module):
    """Learned rates, step bias and frequencies of a `StepDecay`. Models keep them in float32.

    Rates are exp(log_rate) (`A_log` in published code), initially uniform in (min_rate, 16). The bias (`dt_bias`) makes
    steps initially log-uniform in [0.001, 0.1]. Frequencies are initially uniform in (0, 2 pi) radians per unit step.
    All are vectors, so that optimizers apply no weight decay to them.

    Args:
        rates: number of rates.
        steps: number of steps per token.
        min_rate: lower bound of the initial rates.
        rotates: whether there are frequencies.
    """

    def __init__(self, rates: int, steps: int, *, min_rate: float, rotates: bool) -> None:
        super().__init__()
        self.min_rate = min_rate
        self.log_rate: nn.Parameter = nn.Parameter(torch.empty(rates))
        self.step_bias: nn.Parameter = nn.Parameter(torch.empty(steps))
        self.frequency: nn.Parameter | None = nn.Parameter(torch.empty(rates)) if rotates else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the published initial values."""
        with torch.no_grad():
            self.log_rate.uniform_(max(self.min_rate, 1e-4), 16).log_()
            self.step_bias.uniform_(math.log(0.001), math.log(0.1)).exp_().expm1_().log_()  # inverse of softplus
            if self.frequency is not None:
                self.frequency.uniform_(0, 2 * math.pi)

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rates > 0 and, as they are learned, biases of steps and frequencies, in the dtype of beliefs."""
        frequency = None if self.frequency is None else self.frequency.to(dtype)
        return self.log_rate.to(dtype).exp(), self.step_bias.to(dtype), frequency


class DecayStep(NamedTuple):
    """Decay and rotation of one step, in the dtype of beliefs.

    Attributes:
        log_decay: < 0, `[B, T, G]` or `[B, T, G, K]`.
        step: > 0, shaped like `log_decay`, or with a last axis of 1.
        angle: radians, shaped like `log_decay`; `None` without rotations.
    """

    log_decay: Tensor
    step: Tensor
    angle: Tensor | None


class StepDecay(nn.Module):
    """Decay with a step that depends on the token: log_decay = -rate * step, step = softplus(project(x) + bias).

    This is the parametrisation of Mamba-2, Gated DeltaNet and KDA. Angles are frequency * step, so that a step applies
    the eigenvalue exp((-rate + i frequency) step).

    Args:
        hidden_size: D.
        rates: shape of the rates, `(G,)`, or `(G, K)` or `(G, 1)`.
        steps: shape of the steps; that of the rates by default.
        min_rate: lower bound of the initial rates; the upper bound is 16.
        rank: rank of the projection to steps; full rank by default.
        rotates: whether to compute angles.
    """

    def __init__(
        self,
        hidden_size: int,
        rates: tuple[int, ...],
        steps: tuple[int, ...] | None = None,
        *,
        min_rate: float = 0.0,
        rank: int | None = None,
        rotates: bool = False,
    ) -> None:
        super().__init__()
        self.rates = rates
        self.steps: tuple[int, ...] = rates if steps is None else steps
        outputs = math.prod(self.steps)
        self.proj: nn.Module = (
            nn.Linear(hidden_size, outputs, bias=False) if rank is None else low_rank(hidden_size, rank, outputs, False)
        )
        self.dynamics: StepDynamics = StepDynamics(math.prod(rates), outputs, min_rate=min_rate, rotates=rotates)

    def keep_heads(self, ranks: int) -> None:
        """Change sizes to those of the heads of one rank."""
        self.rates = (self.rates[0] // ranks, *self.rates[1:])
        self.steps = (self.steps[0] // ranks, *self.steps[1:])

    def forward(self, x: Tensor) -> DecayStep:
        """Return decays, steps and angles of tokens `[B, T, D]`."""
        raw = to_state_dtype(self.proj(x))
        parameters = self.dynamics(raw.dtype)
        return self._with_rates(F.softplus(raw + parameters[1]), parameters)

    def log_decay(self, x: Tensor) -> Tensor:
        """Return the log-decays of tokens `[B, T, D]`, without steps and angles."""
        return self.log_decay_of(self.proj(x)) if self.takes_projection else self(x).log_decay

    @property
    def takes_projection(self) -> bool:
        """Whether `log_decay_of` may replace a call of the module."""
        is_divisible = math.prod(self.steps) % math.prod(self.rates) == 0
        return is_divisible and is_plain(self, StepDecay) and is_plain(self.dynamics, StepDynamics)

    def log_decay_of(self, projected: Tensor) -> Tensor:
        """Return the log-decays of projected tokens `[B, T, all steps]`."""
        return step_decay(projected, self.dynamics.step_bias, self.dynamics.log_rate).unflatten(-1, self.steps)

    def apply_rates(self, step: Tensor) -> DecayStep:
        """Return decays, steps and angles of steps `[B, T, all steps]`."""
        return self._with_rates(step, self.dynamics(step.dtype))

    def _with_rates(self, step: Tensor, parameters: tuple[Tensor, Tensor, Tensor | None]) -> DecayStep:
        rate, _, frequency = parameters
        step = step.unflatten(-1, self.steps)
        angle = None if frequency is None else frequency.view(self.rates) * step
        return DecayStep(-rate.view(self.rates) * step, step, angle)


class StateDynamics(nn.Module):
    """Learned time-invariant dynamics of H heads with C complex channels, as `kalmix.ops.attend` takes them.

    Per head: the logarithm (see `positive`) of a rate, initially log-uniform in [0.001, 0.1], and of a step, initially
    1, that scales the unit of time; and raw variances with the initial values `STATE_VARIANCES`. Frequencies come in
    pairs of opposite sign, as those of real systems do (Attention as an Adaptive Filter, section 4.2); initially they
    are those of rotary position embeddings.

    Args:
        heads: H.
        channels: C.
        rotary_base: the slowest channel initially rotates once in about 2 pi `rotary_base` units of time; `None`: no
            channel rotates.
        parts: shape of the noises of one head; they are `[H, *parts]`.
        initial: "filter" for the values above; "attention" for process noises from 0.1 (first head) to 0.0001
            (last head), evenly spaced as logarithms, and rates of a tenth of them.
    """

    def __init__(
        self,
        heads: int,
        channels: int,
        rotary_base: float | None,
        parts: tuple[int, ...] = (),
        initial: str = "filter",
    ) -> None:
        super().__init__()
        check_choice("initial", initial, STARTS)
        if rotary_base is not None:
            check_number("rotary_base", rotary_base)
        self.channels = channels
        self.rotary_base = rotary_base
        self.initial = initial
        self.log_rate: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.log_step: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.process_noise: nn.Parameter = nn.Parameter(torch.empty(heads, *parts))
        self.key_noise: nn.Parameter = nn.Parameter(torch.empty(heads, *parts))
        self.query_noise: nn.Parameter = nn.Parameter(torch.empty(heads, *parts))
        pair_count = 0 if rotary_base is None else -(-channels // 2)
        self.frequency: nn.Parameter | None = nn.Parameter(torch.empty(heads, pair_count)) if pair_count else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values; see the class."""
        nn.init.uniform_(self.log_rate, math.log(0.001), math.log(0.1))
        nn.init.zeros_(self.log_step)
        for name, variance in STATE_VARIANCES.items():
            nn.init.constant_(self.get_parameter(name), math.log(math.expm1(variance["initial"])))
        if self.initial == "attention":
            with torch.no_grad():
                first, last = map(math.log10, INITIAL_PROCESS_NOISES)
                noises = torch.logspace(first, last, len(self.process_noise))
                log_rate = (RATE_PER_PROCESS_NOISE * noises).log()
                below = -8 * (-log_rate / 8 - 1).exp()  # inverse of `positive` below e^-8
                self.log_rate.copy_(torch.where(log_rate < -8, below, log_rate))
                self.process_noise.copy_(noises.expm1().log().view(-1, *[1] * (self.process_noise.ndim - 1)))
        if self.frequency is not None and self.rotary_base is not None:
            pairs = self.frequency.shape[1]
            with torch.no_grad():
                self.frequency.copy_(self.rotary_base ** (-torch.arange(pairs) / pairs))

    def raw(self) -> RawDynamics | None:
        """Return the learned parameters, with frequencies 0 if no channel rotates.

        `None` if a head has several noises of one kind.
        """
        if self.key_noise.ndim > 1:
            return None
        frequency = self.frequency
        if frequency is None:
            frequency = self.log_rate.new_zeros(len(self.log_rate), -(-self.channels // 2))
        return RawDynamics(self.log_rate, self.log_step, *self._raw_noises(), frequency)

    def forward(self, dtype: torch.dtype) -> Dynamics:
        """Return the dynamics of all heads, in the dtype of beliefs."""
        step = positive(self.log_step.to(dtype))
        process, key, query = (
            noise_variance(raw.to(dtype), variance["floor"])
            for raw, variance in zip(self._raw_noises(), STATE_VARIANCES.values(), strict=True)
        )
        if self.frequency is None:
            frequency = step.new_zeros(*step.shape, self.channels)
        else:
            half = self.frequency.to(dtype)
            frequency = torch.cat([half, -half], -1)[:, : self.channels] * step[:, None]
        process = process * step.view(-1, *[1] * (process.ndim - 1))
        return Dynamics(-positive(self.log_rate.to(dtype)) * step, frequency, process, key, query)

    def _raw_noises(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the raw variances, in the order of `STATE_VARIANCES`."""
        return self.process_noise, self.key_noise, self.query_noise
