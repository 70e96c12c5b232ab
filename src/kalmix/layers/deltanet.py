"""DeltaNet, and the base class of layers around the op `delta`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kalmix import designs
from kalmix.designs import Design
from kalmix.distributed import ops
from kalmix.layers.fused import HeadSignal
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import to_state_dtype
from kalmix.layers.signal_groups import fused_signals, linear_signal
from kalmix.types import Filtered


class DeltaLayer(MemoryLayer):
    """Base class of layers around `kalmix.ops.delta`, with the gain sigmoid(project(x)).

    With negative eigenvalues the gain is doubled. A gain between 1 and 2 along a unit key gives the transition I - gain
    k k' a negative eigenvalue, which helps state tracking ([Grazzi et al., 2025](https://arxiv.org/abs/2411.12537)). No
    observation noise yields a gain above 1, so `design` is then `None`.

    Args:
        hidden_size: D.
        sizes: number and widths of the heads.
        negative_eigenvalues: whether gains are between 0 and 2 instead of 0 and 1.
        options: options of `MemoryLayer`.
    """

    def __init__(self, hidden_size: int, sizes: Heads, *, negative_eigenvalues: bool, **options: Any) -> None:
        super().__init__(hidden_size, sizes, **options)
        self.max_gain: float = 2.0 if negative_eigenvalues else 1.0
        self.design: Design | None = None if negative_eigenvalues else self.design
        self.gain_proj: nn.Linear = nn.Linear(hidden_size, sizes.heads, bias=False)

    def gain_signal(self) -> HeadSignal | None:
        """Return the gain as a group of `fused_signals`."""
        return linear_signal(self.gain_proj, "sigmoid", self.max_gain)

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the gain, `[B, T, G]`."""
        fused = fused_signals(x, self.gain_signal())
        if fused is not None:
            return {"gain": fused[0]}
        return {"gain": self.max_gain * torch.sigmoid(to_state_dtype(self.gain_proj(x)))}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Call `kalmix.ops.delta`."""
        return ops.delta(q, k, v, **arguments)


class DeltaNet(DeltaLayer):
    """DeltaNet: a memory matrix that each token corrects along its key, without decay.

    Papers: [Linear Transformers Are Secretly Fast Weight Programmers](https://arxiv.org/abs/2102.11174) and
    [Parallelizing Linear Transformers with the Delta Rule](https://arxiv.org/abs/2406.06484).

        M_t = M_{t-1} + g_t k_t (v_t - M_{t-1}' k_t)',   read = M_t' q_t

    M' is the transpose of M, and M_0 = 0. The gain g_t = sigmoid(project(x_t)), or twice that with
    `negative_eigenvalues`, is one number per head. q and k are unit vectors; q is then divided by sqrt(K).

    The layer has no posterior: `layer.filter(x, variance=True)` returns `None` as variance.

    Args:
        hidden_size: D.
        heads: number of heads, G. Default: D / K, rounded.
        head_dim: key width, K. Default: D / heads, rounded down, if `heads` is given; otherwise the largest power of
            two that is at most min(D / 4, 128), but at least 2.
        expand_v: V / K, where V is the value width of a head; K * `expand_v` must be an integer.
        conv: taps of the causal convolution over q, k and v, before SiLU; 0 for SiLU only.
        gate: activation of the output gate, "silu" or "sigmoid"; `None` for no gate, as published.
        negative_eigenvalues: whether g is between 0 and 2 instead of 0 and 1. For g > 1 the matrix I - g k k' has the
            negative eigenvalue 1 - g.
        norm_eps: epsilon of the output norm.
        kernel: name of a kernel of `kalmix.ops.delta`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value; or, in a call, x, state or segments has the wrong
            type, shape, dtype or device, or x is not finite (checked on a CPU).
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`, in the dtype of the parameters;
        under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `state` is a `MemoryState`: `belief.mean` is M, `[N, G, K, V]` in float32 (float64 for float64 inputs), and
        `conv_state` the last `conv - 1` inputs of the convolution.

    Complexity: O(T K V) per head, and the projections.

    Example:
        >>> from kalmix.layers import DeltaNet
        >>> y, state = DeltaNet(64, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape, state.belief.mean.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 2, 32, 32]))
    """

    design: Design | None = designs.DELTANET

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        conv: int = 4,
        gate: str | None = None,
        negative_eigenvalues: bool = False,
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        sizes = Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v)
        options = {"conv": conv, "gate": gate, "norm_eps": norm_eps, "kernel": kernel}
        super().__init__(hidden_size, sizes, negative_eigenvalues=negative_eigenvalues, **options)
