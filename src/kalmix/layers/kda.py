"""Kimi Delta Attention (KDA): a delta rule with a decay per key."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kalmix import designs
from kalmix.designs import Design
from kalmix.layers.branches import run_branches
from kalmix.layers.deltanet import DeltaLayer
from kalmix.layers.head_sizes import Heads
from kalmix.layers.modules import low_rank_pair
from kalmix.layers.parametrize import StepDecay


class KDA(DeltaLayer):
    """Kimi Delta Attention: a delta rule with a gain per head, a decay per key column, and an output gate.

    Paper: [Kimi Linear](https://arxiv.org/abs/2510.26692).

        M_t = diag(a_t) M_{t-1} + g_t k_t (v_t - (diag(a_t) M_{t-1})' k_t)',   read = M_t' q_t

    The gain g_t = sigmoid(project(x_t)), or twice that with `negative_eigenvalues`, is one number per value head. The
    decay a_t = exp(-rate * step_t) has K entries per value head. The rate is a learned positive number per head, and
    step_t = softplus(project(x_t) + bias) has K entries. The projection to steps and, if there is a gate, the
    projection to the gate are products of two matrices with inner size V. M' is the transpose of M, and M_0 = 0. q and
    k are unit vectors; q is then divided by sqrt(K).

    The layer has no posterior: `layer.filter(x, variance=True)` returns `None` as variance.

    Args:
        hidden_size: D.
        heads: number of value heads, G. Default: D / K, rounded.
        key_heads: number of heads of q and k, H, a divisor of `heads`; `heads` by default. Value head g uses key head
            g // (G / H).
        head_dim: key width, K. Default: D / heads, rounded down, if `heads` is given; otherwise the largest power of
            two that is at most min(D / 4, 128), but at least 2.
        expand_v: V / K, where V is the value width of a head; K * `expand_v` must be an integer.
        conv: taps of the causal convolution over q, k and v, before SiLU; 0 for SiLU only.
        gate: activation of the output gate, "sigmoid" or "silu"; `None` for no gate.
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
        >>> from kalmix.layers import KDA
        >>> y, state = KDA(64, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape, state.belief.mean.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 2, 32, 32]))
    """

    design: Design | None = designs.KDA

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        key_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        conv: int = 4,
        gate: str | None = "sigmoid",
        negative_eigenvalues: bool = False,
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        sizes = Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v, key_heads=key_heads)
        rank = sizes.value_width
        options = {"conv": conv, "gate": gate, "gate_rank": rank, "norm_eps": norm_eps, "kernel": kernel}
        super().__init__(hidden_size, sizes, negative_eigenvalues=negative_eigenvalues, **options)
        self.decay: StepDecay = StepDecay(
            hidden_size, (sizes.heads, 1), (sizes.heads, sizes.key_width), min_rate=1.0, rank=rank
        )

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Compute gain `[B, T, G]` and log-decay `[B, T, G, K]`."""
        gain, log_decay = run_branches(x.device, partial(super().signals, x), partial(self.decay.log_decay, x))
        return gain | {"log_decay": log_decay}

    def signals_and_gate(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Compute `signals` and the gate's input; one product serves the inner factors of both low-rank projections."""
        merged = None
        if self.gate_proj is not None and self.decay.takes_projection and type(self).signals is KDA.signals:
            merged = low_rank_pair(x, self.decay.proj, self.gate_proj)
        if merged is None:
            return super().signals_and_gate(x)
        return super().signals(x) | {"log_decay": self.decay.log_decay_of(merged[0])}, merged[1]
