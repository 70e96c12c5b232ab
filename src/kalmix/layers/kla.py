"""Kalman Linear Attention (KLA): a gated layer around the op `diagonal`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix import designs, ops
from kalmix.beliefs import DiagonalBelief, detach, loadable, take, to
from kalmix.designs import Design
from kalmix.layers.base import Mixer, check_state, mask_outside
from kalmix.layers.head_sizes import divide_state
from kalmix.layers.modules import ShortConvolution, l2_normalize
from kalmix.layers.parametrize import CellDynamics, observation_precision
from kalmix.segments import Segments
from kalmix.types import Belief, Filtered, belief_dtype
from kalmix.validation import check_positive_int


@loadable
class KLAState(NamedTuple):
    """What a KLA layer remembers: `belief` `[N, 1, slots, channels]` twice, and the convolution's window."""

    belief: DiagonalBelief
    conv_state: Tensor

    take = take
    to = to
    detach = detach


class KLA(Mixer):
    """Kalman Linear Attention, Algorithm 1 and Figure 7 of the paper: a block in itself, with no MLP behind it.

        z, gate = in(x);  z = SiLU(conv4(z));  v, noise, k, q = project(z)
        y = out((filter(q / |q|, k / |k|, v, precision = 1 / (softplus(noise) + 1e-4)) + skip * z) * SiLU(gate))

    The filter's dynamics are learned per cell and do not depend on the token: filtering is done by uncertainty. The
    skip (a learned scale per channel, initially 1) is one of Figure 7's "residual/skip connections", which Algorithm 1
    leaves out; it carries no uncertainty. The filter runs in float32, under autocast too.

    Args:
        hidden_size: D.
        slots: N, memory slots (the key width) a channel.
        expand: channels = expand * hidden_size; the paper uses 1.
        discretization: "ou" (exact Ornstein-Uhlenbeck, equation 8) or "zoh", the ablation.
        process_noise: false fixes the process noise at 0, the noise-free ablation (section 5.6).
        rank: of the projections to value and noise, `[channels, rank]` then `[rank, 2 channels]`; full if absent.
        kernel: pin a kernel of `kalmix.ops.diagonal`.

    Cost: O(T channels slots) and the projections; the state is 2 slots + 3 numbers a channel, whatever T.
    """

    design: Design | None = designs.KLA
    has_posterior = True
    includes_mlp = True
    repr_attributes = ("slots", "channels")

    def __init__(
        self,
        hidden_size: int,
        *,
        slots: int = 16,
        expand: int = 1,
        discretization: str = "ou",
        process_noise: bool = True,
        rank: int | None = None,
        kernel: str | None = None,
    ) -> None:
        super().__init__(hidden_size)
        for name, value in (("slots", slots), ("expand", expand), ("rank", 1 if rank is None else rank)):
            check_positive_int(name, value)
        channels = expand * hidden_size
        self.slots = slots
        self.channels: int = channels
        self.kernel = kernel
        self.in_proj: nn.Linear = nn.Linear(hidden_size, 2 * channels, bias=False)
        self.conv: ShortConvolution = ShortConvolution(channels)
        self.signal_proj: nn.Linear = nn.Linear(
            channels, (2 * channels if rank is None else rank) + 2 * slots, bias=False
        )
        self.value_proj: nn.Linear | None = None if rank is None else nn.Linear(rank, 2 * channels, bias=False)
        self.dynamics: CellDynamics = CellDynamics(slots, channels, discretization, process_noise)
        self.skip: nn.Parameter = nn.Parameter(torch.empty(channels))
        self.out_proj: nn.Linear = nn.Linear(channels, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The parameters this module holds itself; its parts reset themselves."""
        nn.init.ones_(self.skip)

    @classmethod
    def options_for_state_size(
        cls, width: int, state: int, *, slots: int | None = None, **given: Any
    ) -> dict[str, Any]:
        """Return as many slots as `state` numbers make of a mean and a variance in each of `width` channels."""
        return {"slots": slots or divide_state(state, 2 * width)}

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Rates, steps and diffusions of the cells."""
        return self.dynamics.parameters()

    def read(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, variance: bool = False
    ) -> tuple[Filtered, tuple[Tensor, Tensor]]:
        """The posterior of what the query asks, `[B, T, channels]`, independent between channels."""
        previous = check_state(state, KLAState, x, segments)
        belief, conv_state = (None, None) if previous is None else previous
        signals, (z, gate), conv_state = self.signals(x, conv_state, segments)
        with torch.autocast(x.device.type, enabled=False):
            mean, var, belief = ops.diagonal(
                **signals, belief=belief, variance=variance, segments=segments, kernel=self.kernel
            )
        read = Filtered(mean[:, :, 0], None if var is None else var[:, :, 0], KLAState(belief, conv_state))
        return read, (self.skip.to(z.dtype) * z, F.silu(gate))

    def signals(
        self, x: Tensor, conv_state: Tensor | None = None, segments: Segments | None = None
    ) -> tuple[dict[str, Any], tuple[Tensor, Tensor], Tensor]:
        """What tokens `x` `[B, T, D]` supply: the arguments of `kalmix.ops.diagonal` (one head), what skip and gate
        take (both `[B, T, channels]`), and the convolution's window after them."""
        segment_ids = None if segments is None else segments.segment_ids(*x.shape[:2])
        z, gate = self.in_proj(mask_outside(x, segment_ids)).chunk(2, dim=-1)
        z, after = self.conv(z, conv_state, segments, segment_ids)
        z = F.silu(z)
        projected = self.signal_proj(z)
        q, k, rest = projected.split([self.slots, self.slots, projected.shape[-1] - 2 * self.slots], dim=-1)
        v, noise = (rest if self.value_proj is None else self.value_proj(rest)).chunk(2, dim=-1)
        log_decay, process_noise = self.dynamics(belief_dtype(v.dtype))
        per_token = {"q": l2_normalize(q), "k": l2_normalize(k), "v": v, "precision": observation_precision(noise)}
        signals = {name: signal[:, :, None] for name, signal in per_token.items()}
        return signals | {"log_decay": log_decay, "process_noise": process_noise}, (z, gate), after

    def state_size(self, length: int) -> int:
        """Return the number of means and variances: two a cell."""
        return 2 * self.slots * self.channels

    def write_gain(self, x: Tensor) -> Tensor:
        """Return the write gains `[B, T]`, averaged over cells; O(T) calls of the layer."""
        log_decay, process_noise = self.dynamics(torch.float32)
        squared_decay, state, gains = (2 * log_decay).exp(), None, []
        variance = torch.ones_like(log_decay)[None]  # the prior
        for token in x.split(1, dim=1):
            _, state = self(token, state)
            predicted_variance = squared_decay * variance + process_noise
            variance = state.belief.variance
            gains.append(1 - (variance / predicted_variance).flatten(1).mean(1))
        return torch.stack(gains, 1)

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the Kalman attention maps of all channels (appendix E.4), in closed form."""
        return ops.diagonal_matrix(**self.signals(x)[0]).weights.flatten(1, 2)

    def project_out(self, readout: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        """Skip, gate and output projection."""
        skip, gate = context
        return self.out_proj((readout + skip) * gate)

    def project_out_variance(self, variance: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        """Through the gate, squared, and the output projection, squared; exact, as channels are independent."""
        _, gate = context
        with torch.autocast(variance.device.type, enabled=False):
            dtype = variance.dtype
            return F.linear(variance * gate.to(dtype).square(), self.out_proj.weight.to(dtype).square())
