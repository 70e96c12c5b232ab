"""Transformer block of Adaptive Filter Attention: separate filters for magnitudes and directions, then an MLP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix import designs
from kalmix.beliefs import HistoryBelief, detach, loadable, take, to
from kalmix.designs import Design
from kalmix.distributed import ops
from kalmix.distributed.tensor_parallel import WHOLE, Plan
from kalmix.errors import ArgumentError
from kalmix.layers.base import Mixer, check_state
from kalmix.layers.fused.polar_step import can_fuse_polar, join_step, split_step
from kalmix.layers.head_sizes import Heads
from kalmix.layers.modules import to_state_dtype
from kalmix.layers.parametrize import StateDynamics
from kalmix.layers.robust_weights import RobustWeights, attend_parameters
from kalmix.layers.trajectory_base import complex_heads, trajectory_plan
from kalmix.segments import Segments, mask_outside
from kalmix.steps import Slots
from kalmix.types import Belief, Filtered, without_autocast
from kalmix.validation import can_check_values, check_positive_int

EPS = 1e-6  # added to lengths before dividing by them


@loadable
class AFATransformerState(NamedTuple):
    """State of an `AFATransformerBlock`: past keys and values, split into magnitudes and directions.

    Each field is a `kalmix.HistoryBelief` with S slots for each of N sequences (batch rows, or segments). A call with T
    tokens adds T slots, or B T with segments; with a window, the newest `window` slots remain. A slot has one token, or
    is empty and has position -1. Both fields have the same positions and times. H and C are the block's numbers of
    heads and of complex channels per head. Keys and values are in float32 (float64 for float64 inputs). Fields are not
    checked here; `AFATransformerBlock` raises `ArgumentError` for wrong ones.

    Attributes:
        magnitude: Euclidean norms of the keys and values of each head. Its `keys` and `values` are `[N, S, H, 2]`: the
            norm, and an imaginary part that is 0.
        direction: keys and values divided by their norms, times a learned number per head, the same for both. Its
            `keys` and `values` are `[N, S, H, 2 C]`: C real parts, then C imaginary parts.

    Example:
        >>> from kalmix.layers import AFATransformerBlock
        >>> _, state = AFATransformerBlock(64, heads=4)(torch.randn(3, 10, 64))
        >>> state.magnitude.keys.shape, state.direction.keys.shape
        (torch.Size([3, 10, 4, 2]), torch.Size([3, 10, 4, 16]))
    """

    magnitude: HistoryBelief
    direction: HistoryBelief

    take = take
    to = to
    detach = detach


class FilterAttention(nn.Module):
    """Adaptive Filter Attention without projections, residual and prediction.

    Args:
        heads: H.
        channels: C, complex channels per head.
        rotary_base: base of the initial frequencies; see `StateDynamics`.
    """

    def __init__(self, heads: int, channels: int, rotary_base: float | None) -> None:
        super().__init__()
        self.dynamics: StateDynamics = StateDynamics(heads, channels, rotary_base)
        self.robust_weights: RobustWeights = RobustWeights(heads, nu=1.0)

    def forward(self, signals: Iterable[Tensor], **options: Any) -> Filtered:
        """Call `kalmix.ops.attend` with q, k and v, `[B, T, H, 2 C]` each, and `options`."""
        q, k, v = signals
        parameters = attend_parameters(v, self.dynamics, self.robust_weights)
        if "slots" not in options:
            parameters.pop("floor", None)  # zeros of the fused part
        return ops.attend(q, k, v, **parameters, **options)


class AFATransformerBlock(Mixer):
    """AFA transformer block: filters magnitudes and directions separately, and applies an MLP.

    Paper: [Attention as an Adaptive Filter](https://arxiv.org/abs/2509.04154), Algorithm 3. Misprints
    are corrected; the notes on this layer in the documentation list them.

        q, k, v = project(x)                          H heads of C complex channels each
        m_q = |q|,   u_q = s q / |q|                  magnitude and direction of a head; with the same s for k and v
        d = u_v + attend(u_q, u_k, u_v)
        z = attend(m_q, m_k, m_v) * s' d / |d|        s, s': learned numbers, one per head
        y = W_2 ReLU(W_1 out(z))

    Magnitudes are real numbers. They do not rotate, and have dynamics and noises of their own. A read-out includes the
    token itself and earlier tokens. This layer contains an MLP, so do not add one after it. It does not add x to y, as
    no layer does: the model does that. All projections have biases.

    Args:
        hidden_size: D.
        heads: number of heads, H. Default: D / (2 C), rounded, at least 1.
        head_dim: complex channels per head, C. Default: D / (2 H), rounded down, at least 1, if `heads` is given;
            otherwise the largest power of two that is at most min(D / 4, 64), but at least 2.
        rotary_base: base of the initial frequencies of directions, > 0; see `StateDynamics`.
        window: number of tokens that a query attends to, including its own; all by default.
        mlp_width: hidden width of the MLP, >= 1; 4 D by default.
        kernel: name of a kernel of `kalmix.ops.attend`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value, or no kernel has that name; or, in a call, x, state,
            segments or times has the wrong type, shape, dtype or device, or (checked on CPUs) times decrease in a
            sequence or x has NaN or infinity.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None, times=None)`, x and y are `[B, T, D]` in the dtype of the
        parameters; under autocast x may have another, and y has that of autocast. `times` is `[B, T]`, the time of each
        token, in float64, float32, int64 or int32. Default: one unit per token, continuing from the state. `state`
        is an `AFATransformerState`, as an earlier call returned it.
        State: 2 H (2 C + 2) floats for keys and values and 2 for times per token, of at most `window` tokens.

    Complexity: O(T (S + T) H C) for T tokens after S, the projections and the MLP.

    Example:
        >>> from kalmix.layers import AFATransformerBlock
        >>> y, state = AFATransformerBlock(64, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape, state.direction.keys.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 16, 2, 32]))
    """

    design: Design | None = designs.AFA  # for magnitudes and directions separately
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
        """Set both scales of directions to 1."""
        nn.init.ones_(self.input_scale)
        nn.init.ones_(self.output_scale)

    def head_plan(self, ranks: int) -> Plan:
        """Return how ranks divide the parameters: by heads. Every rank computes the whole MLP."""
        plan = trajectory_plan(self, self.sizes, ranks)
        return plan | {name: WHOLE for name in plan if name.startswith("mlp_")}

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Return rates, steps, frequencies and noises of magnitudes and directions."""
        return chain(self.magnitude.dynamics.parameters(), self.direction.dynamics.parameters())

    def read(
        self,
        x: Tensor,
        state: Belief | None = None,
        segments: Segments | None = None,
        variance: bool = False,
        times: Tensor | None = None,
    ) -> tuple[Filtered, Tensor | None]:
        """Return the filtered states, `[B, T, 2 H C]`; see `TrajectoryLayer.read`. The layer has no variance."""
        previous = check_state(state, AFATransformerState, x, segments)
        segment_ids = None if segments is None else segments.segment_ids(*x.shape[:2])
        mean, final_state = self._attend(mask_outside(x, segment_ids), previous, segments=segments, times=times)
        if previous is not None:
            _check_same_tokens(previous)
        return Filtered(mask_outside(mean, segment_ids), None, final_state), segment_ids

    def read_step(self, x: Tensor, pool: AFATransformerState, slots: Slots) -> tuple[Tensor, None]:
        """Return the read-out `[B, 1, 2 H C]` of one token per row, and no context; update the pool in place."""
        return self._attend(x, pool, slots=slots)[0], None

    def _attend(
        self, x: Tensor, previous: AFATransformerState | None, **options: Any
    ) -> tuple[Tensor, AFATransformerState]:
        """Return the read-out of tokens `[B, T, D]` and the new state; `options` are arguments of the op."""
        projected = self.in_proj(x)
        options |= {"window": self.window, "kernel": self.kernel}
        if previous is not None and "slots" in options:
            with without_autocast(x.device):
                if can_fuse_polar(projected, (self.input_scale, self.output_scale)):
                    return self._attend_fused(projected, previous, options)
        parts = [part.unflatten(-1, (self.sizes.heads, -1)) for part in projected.chunk(3, -1)]
        with without_autocast(x.device):
            lengths = [_length(part) for part in parts]
            units = [_scale(part, length, self.input_scale) for part, length in zip(parts, lengths, strict=True)]
            real = (F.pad(length, (0, 1)).to(x.dtype) for x, length in zip(parts, lengths, strict=True))
            magnitude = self.magnitude(real, belief=None if previous is None else previous.magnitude, **options)
            direction = self.direction(units, belief=None if previous is None else previous.direction, **options)
            sum_of_directions = to_state_dtype(units[2]) + to_state_dtype(direction.mean)
            z = to_state_dtype(magnitude.mean[..., :1]) * _scale(
                sum_of_directions, _length(sum_of_directions), self.output_scale
            )
        return z.flatten(2).to(parts[0].dtype), AFATransformerState(magnitude.belief, direction.belief)

    def _attend_fused(
        self, projected: Tensor, pool: AFATransformerState, options: dict[str, Any]
    ) -> tuple[Tensor, AFATransformerState]:
        """Return the read-out of a step from projected tokens; kernels split them before the filters and join after."""
        lengths, units = (y.chunk(3, 2) for y in split_step(projected, self.input_scale, EPS))
        magnitude = self.magnitude(lengths, belief=pool.magnitude, **options)
        direction = self.direction(units, belief=pool.direction, **options)
        z = join_step(magnitude.mean, direction.mean, units[2], self.output_scale, EPS)
        return z, AFATransformerState(magnitude.belief, direction.belief)

    def state_size(self, length: int) -> int:
        """Return the number of elements of keys, values and times of magnitudes and directions."""
        tokens = length if self.window is None else min(length, self.window)
        return tokens * (4 * (self.sizes.heads + self.sizes.keys) + 2)

    def project_out(self, readout: Tensor, context: Tensor | None) -> Tensor:
        """Apply output projection and MLP; set tokens outside every sequence to 0."""
        return mask_outside(self.mlp_out(F.relu(self.mlp_in(self.out_proj(readout)))), context)


def _check_same_tokens(state: AFATransformerState) -> None:
    """Raise `ArgumentError` unless both histories store tokens with the same positions and times in the same slots."""
    magnitude, direction = state
    if direction.positions.shape != magnitude.positions.shape:
        problem = f"has shape {list(direction.positions.shape)}"
        expected = f"{list(magnitude.positions.shape)}, as state.magnitude.positions"
        raise ArgumentError("state.direction.positions", problem=problem, expected=expected)
    if not can_check_values(magnitude.positions):
        return
    empty = magnitude.positions < 0
    times = [history.times.masked_fill(empty, 0) for history in state]
    if not torch.equal(magnitude.positions, direction.positions) or not torch.equal(*times):
        problem = "has other positions or times than state.magnitude"
        raise ArgumentError("state.direction", problem=problem, expected="a state that a call of the layer returned")


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(to_state_dtype(x), dim=-1, keepdim=True)


def _scale(x: Tensor, length: Tensor, scale: Tensor) -> Tensor:
    return (scale.to(length.dtype)[:, None] * x / (length + EPS)).to(x.dtype)
