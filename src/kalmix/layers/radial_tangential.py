"""Radial-tangential Adaptive Filter Attention: separate noises for the magnitude and the direction of a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.distributed import ops
from kalmix.layers.robust_weights import RobustWeights
from kalmix.layers.trajectory_base import TrajectoryLayer, complex_heads
from kalmix.ops import Dynamics
from kalmix.segments import Segments
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import check_choice, check_positive_int

KERNELS = ("triton", "reference")  # of `attend_radial`


class RadialTangentialAttention(TrajectoryLayer):
    """Radial-tangential Adaptive Filter Attention: separate noises for the magnitude and the direction of a state.

    Paper: [Attention as an Adaptive Filter](https://arxiv.org/abs/2509.04154), Algorithm 2. Misprints
    are corrected; docs/layers/notes/rt-afa.md lists them.

    Let v be the value of the current token. The layer splits each value, v and past ones, into a part parallel to v and
    a part orthogonal to v. Each part has its own noises and attention weights. The parallel parts give the magnitude of
    the estimate, the orthogonal parts its direction. `kalmix.ops.attend_radial` has the equations. The output is the
    projection of the predicted state z:

        z = (1 - g) v + g estimate;  y = out(e^{(-a + i w) horizon} z)

    Each head learns the decay rate a and the weight g, initially 0.5; each channel learns a frequency w.

    `layer.filter(x, variance=True)` returns `kalmix.Filtered`: mean (y), variance `[B, T, D]` in float32 (float64 for
    float64 inputs), and belief (the state). The variance is approximate: it treats v as known and the errors of tokens
    as independent, and omits the correlation of channels. The prediction adds process noise, the same to each channel
    of a head: its average over the channels.

    Args:
        hidden_size: D.
        heads: number of heads, H. Default: D / (2 C), rounded, at least 1.
        head_dim: complex channels per head, C. Default: D / (2 H), rounded down, at least 1, if `heads` is given;
            otherwise the largest power of two that is at most min(D / 4, 64), but at least 2.
        rotary_base: base of the initial frequencies, > 0: with P = C / 2 rounded up, they are plus and minus
            `rotary_base`^(-j / P) radians per unit of time, j = 0 to P - 1.
        window: number of tokens that a query attends to, including its own, >= 1; all by default.
        predict: "step" predicts z at `horizon` after the token, as published; "gate" mixes z and that prediction by a
            gate computed from the token; `None` returns z and ignores `horizon`.
        kernel: name of a kernel of `kalmix.ops.attend_radial`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value; or, in a call, an argument has the wrong type, shape,
            dtype or device, x, times or horizon is not finite, times decrease in a sequence, or a horizon is negative.
            Values are checked on the CPU; on a GPU only inside `kalmix.checks()`.
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None, times=None, horizon=None)`, x and y are `[B, T, D]`, in the
        dtype of the parameters; under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `times` `[B, T]`: time of each token, in any unit, non-decreasing in a sequence; float64, float32, int64 or
        int32. Default: 0, 1, 2, ... in each sequence, or from the last time of `state` plus 1.
        `horizon` `[B, T]` >= 0: time from each token to its prediction, in a dtype of `times`, bfloat16 or
        float16; 1 by default.
        `state` is a `kalmix.HistoryBelief` of all past tokens, or the newest `window`: keys and values
        `[N, S, H, 2 C]` in float32 (float64 for float64 inputs), times and positions.

    Complexity: O(T (S + T) H C) for T tokens after S stored ones, and the projections. A `window` limits S. If
    `state` is `None`, blocks of queries also skip tokens before their window.

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
        kernel: str | None = None,
    ) -> None:
        check_positive_int("window", 1 if window is None else window)
        if kernel is not None:
            check_choice("kernel", kernel, KERNELS)
        sizes = complex_heads(hidden_size, heads, head_dim)
        super().__init__(hidden_size, sizes, rotary_base=rotary_base, parts=(2,), predict=predict, kernel=kernel)
        self.window = window
        self.robust_weights: RobustWeights = RobustWeights(sizes.heads, nu=(2.0, 2.0 * max(1, sizes.key_width - 1)))

    def state_dynamics(self, dtype: torch.dtype) -> Dynamics:
        """Return the dynamics, with noises averaged over channels: one is along the direction, the others across it."""
        return self._averaged(self.dynamics(dtype))

    def _averaged(self, dynamics: Dynamics) -> Dynamics:
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
    ) -> tuple[Filtered, Dynamics]:
        """Call `kalmix.ops.attend_radial`."""
        dtype = belief_dtype(q.dtype)
        dynamics = self.dynamics(dtype)
        arguments: dict[str, Any] = dynamics._asdict() | self.robust_weights(dtype)
        arguments |= {"window": self.window, "variance": variance, "kernel": self.kernel}
        filtered = ops.attend_radial(q, k, v, belief=belief, segments=segments, times=times, **arguments)
        return filtered, self._averaged(dynamics)
