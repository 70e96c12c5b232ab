"""Gated DeltaNet: a delta rule with a decay per head."""

from __future__ import annotations

from torch import Tensor

from kalmix import designs
from kalmix.designs import Design
from kalmix.layers.deltanet import DeltaLayer
from kalmix.layers.head_sizes import Heads
from kalmix.layers.parametrize import StepDecay
from kalmix.layers.signal_groups import decay_signal, fused_signals


class GatedDeltaNet(DeltaLayer):
    """Gated DeltaNet: a delta rule with a gain and a decay per head, and a gated output.

    Paper: [Gated Delta Networks](https://arxiv.org/abs/2412.06464).

        M_t = a_t M_{t-1} + g_t k_t (v_t - a_t M_{t-1}' k_t)',   read = M_t' q_t

    M' is the transpose of M, and M_0 = 0. The gain g_t = sigmoid(project(x_t)), or twice that with
    `negative_eigenvalues`, and the decay a_t = exp(-rate step_t) are one number per head. The rate is a learned
    positive number per head, and step_t = softplus(project(x_t) + bias). q and k are unit vectors; q is then divided
    by sqrt(K).

    Default sizes are as published: the keys of all heads have 0.75 D columns, values twice as many; about 6 D^2 weights
    in all.

    The layer has no posterior: `layer.filter(x, variance=True)` returns `None` as variance.

    Args:
        hidden_size: D.
        heads: number of value heads, G. Default: 0.75 D / K, rounded.
        key_heads: number of heads of q and k, H, a divisor of `heads`; `heads` by default. Value head g uses key head
            g // (G / H).
        head_dim: key width, K. Default: 0.75 D / heads, rounded down, if `heads` is given; otherwise the largest power
            of two that is at most min(D / 4, 128), but at least 2.
        expand_v: V / K, where V is the value width of a head; K * `expand_v` must be an integer.
        conv: taps of the causal convolution over q, k and v, before SiLU; 0 for SiLU only.
        gate: activation of the output gate, "silu" or "sigmoid"; `None` for no gate.
        negative_eigenvalues: whether g is between 0 and 2 instead of 0 and 1. For g > 1 the matrix I - g k k' has the
            negative eigenvalue 1 - g.
        norm_eps: epsilon of the output norm.
        kernel: name of a kernel of `kalmix.ops.delta`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value, or `key_heads` does not divide `heads`; or, in a call, x,
            state or segments has the wrong type, shape, dtype or device, or x is not finite (checked on a CPU).
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
        >>> from kalmix.layers import GatedDeltaNet
        >>> y, state = GatedDeltaNet(64, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape, state.belief.mean.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 2, 24, 48]))
    """

    design: Design | None = designs.GATED_DELTANET

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        key_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        conv: int = 4,
        gate: str | None = "silu",
        negative_eigenvalues: bool = False,
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        sizes = Heads.of(
            hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v, key_heads=key_heads, share=0.75
        )
        options = {"conv": conv, "gate": gate, "norm_eps": norm_eps, "kernel": kernel}
        super().__init__(hidden_size, sizes, negative_eigenvalues=negative_eigenvalues, **options)
        self.decay: StepDecay = StepDecay(hidden_size, (sizes.heads,))

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Compute gain and log-decay, `[B, T, G]`."""
        fused = fused_signals(x, self.gain_signal(), decay_signal(self.decay))
        if fused is not None:
            return dict(zip(("gain", "log_decay"), fused, strict=True))
        return super().signals(x) | {"log_decay": self.decay.log_decay(x)}
