"""The transformer that Adaptive Filter Attention suggests: magnitudes and directions filtered apart, then an MLP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix import designs, ops
from kalmix.beliefs import HistoryBelief, detach, loadable, take, to
from kalmix.designs import Design
from kalmix.layers.base import Mixer, check_state, mask_outside
from kalmix.layers.head_sizes import Heads
from kalmix.layers.modules import to_state_dtype
from kalmix.layers.parametrize import StateDynamics
from kalmix.layers.robust_weights import RobustWeights
from kalmix.layers.trajectory_base import complex_heads
from kalmix.segments import Segments
from kalmix.types import Belief, Filtered, belief_dtype
from kalmix.validation import check_positive_int

EPS = 1e-6  # in the length of what is divided by it


@loadable
class AFATransformerState(NamedTuple):
    """What was seen: `magnitude`, one real channel a head, and `direction`."""

    magnitude: HistoryBelief
    direction: HistoryBelief

    take = take
    to = to
    detach = detach


class FilterAttention(nn.Module):
    """Algorithm 1 without projections, residual and prediction: q, k and v are given, of H heads and C channels."""

    def __init__(self, heads: int, channels: int, rotary_base: float | None) -> None:
        super().__init__()
        self.dynamics: StateDynamics = StateDynamics(heads, channels, rotary_base)
        self.robust_weights: RobustWeights = RobustWeights(heads, nu=1.0)

    def forward(self, signals: Iterable[Tensor], **options: Any) -> Filtered:
        """`kalmix.ops.attend` of q, k and v, `[B, T, H, 2 C]` each."""
        q, k, v = signals
        dtype = belief_dtype(v.dtype)
        return ops.attend(q, k, v, **self.dynamics(dtype)._asdict(), **self.robust_weights(dtype), **options)


class AFATransformerBlock(Mixer):
    """The AFA transformer (Algorithm 3, its misprints mended), a block in itself: its MLP comes with it.

        q, k, v = project(x);   m = |.|,  u = scale . / |.|  of each
        direction = u_v + attend(u_q, u_k, u_v);   z = attend(m_q, m_k, m_v) scale' direction / |direction|
        y = W_2 ReLU(W_1 out(z))

    Per head: Norm, Attention, Add & Norm, in the eigenbasis. Magnitudes are real, do not turn, and have dynamics and
    noises of their own. The paper adds y to x, as a model's block does for every mixer.

    Args:
        hidden_size: D.
        heads, head_dim: heads, and complex channels of each; see `complex_heads`.
        rotary_base: of initial frequencies of directions; see `StateDynamics`.
        window: number of tokens a query sees, itself and the `window` - 1 before it; all if absent.
        mlp_width: of the MLP; 4 D if absent.
        kernel: pin a kernel of `kalmix.ops.attend`.

    Cost: O(T (S + T) H C) for T tokens after S, and the projections; the state holds every key and value.
    """

    design: Design | None = designs.AFA  # of magnitudes and of directions, each by itself
    includes_mlp = True

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        rotary_base: float = 10000.0,
        window: int | None = None,
        mlp_width: int | None = None,
        kernel: str | None = None,
    ) -> None:
        super().__init__(hidden_size)
        check_positive_int("window", 1 if window is None else window)
        check_positive_int("mlp_width", 1 if mlp_width is None else mlp_width)
        sizes = complex_heads(hidden_size, heads, head_dim)
        columns, width = 2 * sizes.keys, 4 * hidden_size if mlp_width is None else mlp_width
        self.sizes: Heads = sizes
        self.window = window
        self.kernel = kernel
        self.in_proj: nn.Linear = nn.Linear(hidden_size, 3 * columns)
        self.magnitude: FilterAttention = FilterAttention(sizes.heads, 1, None)
        self.direction: FilterAttention = FilterAttention(sizes.heads, sizes.key_width, rotary_base)
        self.input_scale: nn.Parameter = nn.Parameter(torch.empty(sizes.heads))
        self.output_scale: nn.Parameter = nn.Parameter(torch.empty(sizes.heads))
        self.out_proj: nn.Linear = nn.Linear(columns, hidden_size)
        self.mlp_in: nn.Linear = nn.Linear(hidden_size, width)
        self.mlp_out: nn.Linear = nn.Linear(width, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both scales of directions are 1; parts reset themselves."""
        nn.init.ones_(self.input_scale)
        nn.init.ones_(self.output_scale)

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Rates, steps, frequencies and noises of magnitudes and of directions."""
        return chain(self.magnitude.dynamics.parameters(), self.direction.dynamics.parameters())

    def read(
        self,
        x: Tensor,
        state: Belief | None = None,
        segments: Segments | None = None,
        variance: bool = False,
        times: Tensor | None = None,
    ) -> tuple[Filtered, Tensor | None]:
        """The states as filtered, `[B, T, H * 2 C]`; `times` as `kalmix.ops.attend` takes them."""
        previous = check_state(state, AFATransformerState, x, segments)
        segment_ids = None if segments is None else segments.segment_ids(*x.shape[:2])
        parts = [
            part.unflatten(-1, (self.sizes.heads, -1))
            for part in self.in_proj(mask_outside(x, segment_ids)).chunk(3, -1)
        ]
        options = {"segments": segments, "times": times, "window": self.window, "kernel": self.kernel}
        with torch.autocast(x.device.type, enabled=False):
            lengths = [_length(part) for part in parts]
            units = [_scaled(part, length, self.input_scale) for part, length in zip(parts, lengths, strict=True)]
            real = (F.pad(length, (0, 1)).to(x.dtype) for x, length in zip(parts, lengths, strict=True))
            magnitude = self.magnitude(real, belief=None if previous is None else previous.magnitude, **options)
            direction = self.direction(units, belief=None if previous is None else previous.direction, **options)
            sum_of_directions = to_state_dtype(units[2]) + to_state_dtype(direction.mean)
            z = to_state_dtype(magnitude.mean[..., :1]) * _scaled(
                sum_of_directions, _length(sum_of_directions), self.output_scale
            )
        final_state = AFATransformerState(magnitude.belief, direction.belief)
        return Filtered(mask_outside(z.flatten(2).to(parts[0].dtype), segment_ids), None, final_state), segment_ids

    def state_size(self, length: int) -> int:
        """Return the number of elements of keys, values and times of magnitudes (one channel) and directions."""
        tokens = length if self.window is None else min(length, self.window)
        return tokens * (4 * (self.sizes.heads + self.sizes.keys) + 2)

    def project_out(self, readout: Tensor, context: Tensor | None) -> Tensor:
        """Output projection and MLP; 0 at tokens of no sequence, which `context` tells."""
        return mask_outside(self.mlp_out(F.relu(self.mlp_in(self.out_proj(readout)))), context)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(to_state_dtype(x), dim=-1, keepdim=True)


def _scaled(x: Tensor, length: Tensor, scale: Tensor) -> Tensor:
    return (scale.to(length.dtype)[:, None] * x / (length + EPS)).to(x.dtype)
