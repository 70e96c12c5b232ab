"""Kalman Linear Attention (KLA): a gated layer around the op `diagonal`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix import designs
from kalmix.beliefs import DiagonalBelief, detach, loadable, take, to
from kalmix.designs import Design
from kalmix.distributed import ops
from kalmix.distributed.tensor_parallel import SHARED, Plan, Split, check_divides, gather_channels
from kalmix.errors import ArgumentError
from kalmix.layers.base import Mixer, check_state
from kalmix.layers.branches import run_branches
from kalmix.layers.fused import (
    Gate,
    GatedSkip,
    Norm,
    RawCellSignals,
    can_fuse_cells,
    cell_step,
    gated_skip,
    l2_normalize,
    rms_norm,
    without_storing,
)
from kalmix.layers.head_sizes import divide_state
from kalmix.layers.modules import ShortConvolution, linear_variance
from kalmix.layers.parametrize import CellDynamics, observation_precision
from kalmix.segments import Segments, mask_outside
from kalmix.steps import Slots
from kalmix.types import Belief, Filtered, belief_dtype, without_autocast
from kalmix.validation import MAX_FLOAT, check_choice, check_number, check_positive_int

VALUES = ("projected", "conv")
NORM_EPS = 1e-5
Context = tuple[Tensor, Tensor, Tensor]  # outputs of the convolution, inputs of the gate, read-out


@loadable
class KLAState(NamedTuple):
    """State of a KLA layer: N sequences after their last token. A layer checks the fields; this class does not.

    Attributes:
        belief: `DiagonalBelief`, posterior `mean` and `variance` of the cells, `[N, 1, slots, channels]` each, for one
            head and `expand` D channels; in float32 (float64 if the inputs are float64).
        conv_state: last three inputs of the short convolution, oldest first, `[N, 3, channels]`; 0 before the first
            token. The layer returns it in the dtype of its projections (bfloat16 under autocast to bfloat16).

    Example:
        >>> from kalmix.layers import KLA
        >>> _, state = KLA(64, slots=8)(torch.randn(3, 16, 64))
        >>> state.belief.variance.shape, state.conv_state.shape
        (torch.Size([3, 1, 8, 64]), torch.Size([3, 3, 64]))
    """

    belief: DiagonalBelief
    conv_state: Tensor

    take = take
    to = to
    detach = detach


class KLA(Mixer):
    """Kalman Linear Attention: an exact Kalman filter for every cell (slot, channel) of a memory, with a gated output.

    Paper: [Kalman Linear Attention](https://arxiv.org/abs/2602.10743), Algorithm 1, Figure 7, equations 16 to 20.

        z, gate = in(x);  z = SiLU(conv4(z));  v, noise, k, q = project(z)
        read = diagonal(q / |q|, k / |k|, v, precision = 1 / (softplus(noise) + 1e-4))
        y = out((read + skip * z) * SiLU(gate))

    This layer gates its own output, so it is published alone in a residual block, without an MLP. A language model
    with fewer blocks and an MLP behind each layer bears higher learning rates (docs/results/language.md).

    `diagonal` is the filter, `kalmix.ops.diagonal`; all channels share q and k. conv4 is a causal convolution per
    channel with 4 taps. Decay and process noise are learned per cell and do not depend on the token. The observation
    noise does: a token with less noise changes the memory more. The skip is a learned scale per channel, shown
    in Figure 7 but not in Algorithm 1. The filter runs in float32, also under autocast (in float64 for float64
    inputs).

    `layer.filter(x, variance=True)` returns `kalmix.Filtered`: mean (y), variance `[B, T, D]` in float32 (float64 for
    float64 inputs), and belief (the state). The variance is that of the memory, propagated to y; skip and gate are
    treated as known.

    Args:
        hidden_size: D.
        slots: number of memory slots per channel, the key width (N in the paper), >= 1.
        expand: number of channels divided by D, an integer >= 1; 1 in the paper.
        discretization: "ou" (exact Ornstein-Uhlenbeck process, equation 8) or "zoh" (zero-order hold, an ablation).
        process_noise: False fixes the process noise at 0 (ablation of section 5.6).
        rank: rank of the one projection to v and noise (to the noise if `value` is "conv"), >= 1; by default full rank.
        value: "projected": v is a projection of z, as published; "conv": v is z, as in the language models of the
            authors' code, which project the noise with a rank of D / 8, rounded up.
        diffusion: how the process noise depends on its parameter p, initially 0.01. "variance": it is
            p (1 - exp(-2 a s)) / (2 a) for the rate a and the step s, as in the authors' code; "deviation": p^2 is in
            place of p, as in equation 8.
        initial_skip: initial skip; -1 in the authors' code.
        norm_width: number of channels that an RMS norm of `read + skip * z`, before the gate, takes together, a divisor
            of the channels; by default, as published, there is no norm. With it, gradients of deep models grow less in
            the first steps.
        kernel: name of a kernel of `kalmix.ops.diagonal`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value; or, in a call, x, state or segments has the wrong type,
            shape, dtype or device, or x is not finite (checked on a CPU).
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`, in the dtype of the parameters;
        under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `state` is a `KLAState` of `2 slots + 3` floats for each of the `expand` D channels. `None` is the prior, with
        mean 0 and variance 1.

    Complexity: O(T channels slots), and the projections.

    Example:
        >>> from kalmix.layers import KLA
        >>> layer = KLA(64)
        >>> y, state = layer(torch.randn(2, 16, 64))
        >>> y, state = layer(torch.randn(2, 1, 64), state)  # decode one more token
        >>> y.shape, state.belief.mean.shape
        (torch.Size([2, 1, 64]), torch.Size([2, 1, 16, 64]))
    """

    design: Design | None = designs.KLA
    has_posterior = True
    includes_mlp = True
    repr_attributes = ("slots", "channels", "value")

    def __init__(
        self,
        hidden_size: int,
        *,
        slots: int = 16,
        expand: int = 1,
        discretization: str = "ou",
        process_noise: bool = True,
        rank: int | None = None,
        value: str = "projected",
        diffusion: str = "variance",
        initial_skip: float = 1.0,
        norm_width: int | None = None,
        kernel: str | None = None,
    ) -> None:
        super().__init__(hidden_size)
        for name, size in (("slots", slots), ("expand", expand), ("rank", rank), ("norm_width", norm_width)):
            check_positive_int(name, 1 if size is None else size)
        check_choice("value", value, VALUES)
        check_number("initial_skip", initial_skip, minimum=-MAX_FLOAT)
        channels = expand * hidden_size
        if norm_width is not None and channels % norm_width:
            raise ArgumentError("norm_width", got=norm_width, expected=f"a divisor of {channels} (channels)")
        self.slots = slots
        self.channels: int = channels
        self.kernel = kernel
        self.in_proj: nn.Linear = nn.Linear(hidden_size, 2 * channels, bias=False)
        self.conv: ShortConvolution = ShortConvolution(channels, activation="silu")
        wide = channels if value == "conv" else 2 * channels  # noise, and the value if it is projected
        self.value = value
        self.initial_skip = initial_skip
        self.signal_proj: nn.Linear = nn.Linear(channels, (wide if rank is None else rank) + 2 * slots, bias=False)
        self.value_proj: nn.Linear | None = None if rank is None else nn.Linear(rank, wide, bias=False)
        self.dynamics: CellDynamics = CellDynamics(slots, channels, discretization, process_noise, diffusion)
        self.skip: nn.Parameter = nn.Parameter(torch.empty(channels))
        self.norm_width = norm_width
        self.norm_scale: nn.Parameter | None = None if norm_width is None else nn.Parameter(torch.empty(channels))
        self.out_proj: nn.Linear = nn.Linear(channels, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the skip to its initial value, and the scale of the norm to 1."""
        nn.init.constant_(self.skip, self.initial_skip)
        if self.norm_scale is not None:
            nn.init.ones_(self.norm_scale)

    @classmethod
    def options_for_state_size(
        cls, width: int, state: int, *, slots: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return the number of slots for a state of `state` numbers: a mean and a variance per slot and channel."""
        return {"slots": slots or divide_state(state, 2 * width)}

    def head_plan(self, ranks: int) -> Plan:
        """Return how ranks divide the parameters: by channels. Every rank computes all queries and keys."""
        channels, rank = self.channels, self.signal_proj.out_features - 2 * self.slots
        check_divides(self, "channels", channels, ranks)
        if self.norm_width is not None:
            check_divides(self, "groups of channels with a norm", channels // self.norm_width, ranks)
        pair = Split(0, (channels, channels))
        wide = Split(0, (channels,)) if self.value == "conv" else pair
        plan: Plan = {name: Split(0, (channels,)) for name, _ in self.named_parameters()}
        plan |= {name: Split(1, (channels,)) for name in plan if name.startswith(("dynamics.", "out_proj."))}
        if self.value_proj is None:
            plan["signal_proj.weight"] = Split(0, wide.parts, shared=2 * self.slots)
            return plan | {"in_proj.weight": pair}
        assert rank == self.value_proj.in_features
        return plan | {"in_proj.weight": pair, "signal_proj.weight": SHARED, "value_proj.weight": wide}

    def keep_heads(self, ranks: int, rank: int) -> None:
        """Change sizes to those of the channels of one rank."""
        self.channels //= ranks
        self.conv.channels //= ranks

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Return rates, steps and diffusions of the cells."""
        return self.dynamics.parameters()

    def read(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, variance: bool = False
    ) -> tuple[Filtered, Context]:
        """Return the posterior of the read-out, `[B, T, channels]`, independent between channels; see `Mixer.read`."""
        previous = check_state(state, KLAState, x, segments)
        belief, conv_state = (None, None) if previous is None else previous
        signals, (z, gate), conv_state = self.signals(x, conv_state, segments)
        with without_autocast(x.device):
            mean, var, belief = ops.diagonal(
                **signals, belief=belief, variance=variance, segments=segments, kernel=self.kernel
            )
        read = Filtered(mean[:, :, 0], None if var is None else var[:, :, 0], KLAState(belief, conv_state))
        return read, (z, gate, read.mean)

    def read_step(self, x: Tensor, pool: KLAState, slots: Slots) -> tuple[Tensor, Context | None]:
        """Return the read-out `[B, 1, channels]` of one token per row, and its context; update the pool in place.

        On GPUs one kernel also applies skip and gate, unless there is a norm; the context is then `None`.
        """
        belief = pool.belief
        (raw, (z, gate), _), dynamics = run_branches(
            x.device,
            partial(self._project, x, pool.conv_state, slots=slots),
            partial(self.dynamics, belief.mean.dtype),
        )
        skip = GatedSkip(z, self.skip, gate)
        kernel = ops.STEP_KERNELS.get(self.kernel or "")
        if self.norm_scale is None and can_fuse_cells(raw, skip, belief, kernel):
            return cell_step(raw, skip, dynamics, belief, slots), None
        with without_autocast(x.device):
            signals = self._activate(raw, dynamics)
            mean = ops.diagonal(**signals, belief=belief, slots=slots, kernel=self.kernel).mean
        return mean[:, :, 0], (z, gate, mean[:, :, 0])

    def signals(
        self, x: Tensor, conv_state: Tensor | None = None, segments: Segments | None = None
    ) -> tuple[dict[str, Any], tuple[Tensor, Tensor], Tensor]:
        """Compute the arguments of the op from tokens.

        Args:
            x: tokens `[B, T, D]`.
            conv_state: state of the convolution, or `None`.
            segments: runs of tokens that form sequences, or `None`.

        Returns:
            Arguments of `kalmix.ops.diagonal` (with one head); the inputs of skip and gate, `[B, T, channels]` each;
            and the new state of the convolution.
        """
        raw, context, after = self._project(x, conv_state, segments)
        return self._activate(raw, self.dynamics(belief_dtype(raw.v.dtype))), context, after

    def _project(
        self,
        x: Tensor,
        conv_state: Tensor | None = None,
        segments: Segments | None = None,
        slots: Slots | None = None,
    ) -> tuple[RawCellSignals, tuple[Tensor, Tensor], Tensor]:
        """Project tokens; return the signals before norms and activations, and the other results of `signals`.

        In a step, `slots` are the slots of each row, and `conv_state` is a pool.
        """
        segment_ids = None if segments is None else segments.segment_ids(*x.shape[:2])
        z, gate = self.in_proj(mask_outside(x, segment_ids)).chunk(2, dim=-1)
        if slots is not None and conv_state is not None:
            z, after = self.conv.step(z, conv_state, slots), conv_state
        else:
            z, after = self.conv(z, conv_state, segments, segment_ids)
        projected = self.signal_proj(gather_channels(z, self.tensor_parallel))
        q, k, rest = projected.split([self.slots, self.slots, projected.shape[-1] - 2 * self.slots], dim=-1)
        rest = rest if self.value_proj is None else self.value_proj(rest)
        v, noise = (z, rest) if self.value == "conv" else rest.chunk(2, dim=-1)
        return RawCellSignals(q, k, v, noise), (z, gate), after

    def _activate(self, raw: RawCellSignals, dynamics: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Apply norms and activations; return the arguments of `kalmix.ops.diagonal`, with one head."""
        q, k, precision = l2_normalize(raw.q), l2_normalize(raw.k), observation_precision(raw.noise)
        per_token = {"q": q, "k": k, "v": raw.v, "precision": precision}
        signals = {name: signal[:, :, None] for name, signal in per_token.items()}
        return signals | {name: x[None] for name, x in zip(("log_decay", "process_noise"), dynamics, strict=True)}

    def state_size(self, length: int) -> int:
        """Return the number of means and variances."""
        return 2 * self.slots * self.channels

    def write_gain(self, x: Tensor) -> Tensor:
        """Return the write gains `[B, T]`, averaged over cells; calls the layer once per token."""
        log_decay, process_noise = self.dynamics(torch.float32)
        squared_decay, state, gains = (2 * log_decay).exp(), None, []
        variance = torch.ones_like(log_decay)[None]  # prior
        for token in x.split(1, dim=1):
            _, state = self(token, state)
            predicted_variance = squared_decay * variance + process_noise
            variance = state.belief.variance
            gains.append(1 - (variance / predicted_variance).flatten(1).mean(1))
        return torch.stack(gains, 1)

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the attention maps of all channels in closed form (appendix E.4), `[B, channels, T, T]`."""
        return ops.diagonal_matrix(**self.signals(x)[0]).weights.flatten(1, 2)

    def project_out(self, readout: Tensor, context: Context | None) -> Tensor:
        """Apply skip, norm, gate and the output projection; without a context, the projection alone."""
        if context is None:
            return self.out_proj(readout)
        z, gate, _ = context
        if self.norm_scale is None:
            return without_storing(partial(gated_skip, readout, z, self.skip, gate), self.out_proj)
        assert self.norm_width is not None
        skipped = readout + self.skip.to(z.dtype) * z
        norm = Norm(self.norm_width, NORM_EPS)
        return without_storing(partial(rms_norm, skipped, self.norm_scale, norm, Gate(gate)), self.out_proj)

    def project_out_variance(self, variance: Tensor, context: Context) -> Tensor:
        """Propagate the variance through gate and output projection; exact, since channels are independent.

        The norm divides by a random root mean square; here its square is replaced by the expected one. This is exact in
        the limit of wide norms.
        """
        z, gate, mean = context
        with without_autocast(variance.device):
            if self.norm_scale is not None:
                assert self.norm_width is not None
                skipped = mean.to(variance.dtype) + self.skip.to(variance.dtype) * z.to(variance.dtype)
                squares = (skipped.square() + variance).unflatten(-1, (-1, self.norm_width))
                scale = self.norm_scale.to(variance.dtype).unflatten(-1, (-1, self.norm_width))
                factor = scale.square() / (squares.mean(-1, keepdim=True) + NORM_EPS)
                variance = variance * factor.flatten(-2)
            return linear_variance(self.out_proj, variance * F.silu(gate).to(variance.dtype).square())
