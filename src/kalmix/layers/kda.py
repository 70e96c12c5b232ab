"""Kimi Delta Attention (KDA): a gated delta rule in which every key has a decay of its own."""

from __future__ import annotations

from torch import Tensor

from kalmix import designs
from kalmix.designs import Design
from kalmix.layers.deltanet import DeltaLayer
from kalmix.layers.head_sizes import Heads
from kalmix.layers.parametrize import StepDecay


class KDA(DeltaLayer):
    """Kimi Delta Attention (Kimi Team, 2025): a gain per head, a decay per key, a low-rank sigmoid gate.

    The steps of the decays, per key, come through a projection of rank V; rates are per head.

    Args:
        hidden_size: D.
        heads, head_dim, expand_v: value heads, key width, value width over key width; see `Heads.of`.
        key_heads: key heads, a divisor of `heads`; as many if absent.
        conv: taps of the short convolution, 0 for none.
        gate: of the output, "sigmoid" or "silu"; `None` for none.
        negative_eigenvalues: gains up to 2.
        norm_eps: of the output norm.
        kernel: pin a kernel of `kalmix.ops.delta`.

    Cost: O(T K V) a head and the projections; the state is `[G, K, V]` and the convolution's window.
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
        """Gain `[B, T, G]` and log-decay `[B, T, G, K]`."""
        return super().signals(x) | {"log_decay": self.decay(x).log_decay}
