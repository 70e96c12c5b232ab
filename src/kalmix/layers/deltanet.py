"""DeltaNet: a memory corrected along the key, by a gain that the token sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kalmix import designs, ops
from kalmix.designs import Design
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import to_state_dtype
from kalmix.types import Filtered


class DeltaLayer(MemoryLayer):
    """What the delta family shares: the op, and the gain sigmoid(project(x)), twice that with negative eigenvalues.

    A gain up to 2 along a unit key lets the transition I - gain k k' turn a direction round, which tracking a state
    can need (Grazzi et al., 2025); up to 1 it can only forget it. No observation noise gives a gain above 1, so that
    no design describes a layer with negative eigenvalues.
    """

    def __init__(self, hidden_size: int, sizes: Heads, *, negative_eigenvalues: bool, **options: Any) -> None:
        super().__init__(hidden_size, sizes, **options)
        self.max_gain: float = 2.0 if negative_eigenvalues else 1.0
        self.design: Design | None = None if negative_eigenvalues else self.design
        self.gain_proj: nn.Linear = nn.Linear(hidden_size, sizes.heads, bias=False)

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """The gain, `[B, T, G]`."""
        return {"gain": self.max_gain * torch.sigmoid(to_state_dtype(self.gain_proj(x)))}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """`kalmix.ops.delta`."""
        return ops.delta(q, k, v, **arguments)


class DeltaNet(DeltaLayer):
    """DeltaNet (Yang et al., 2024): unit keys, a gain per head, no decay, no gate.

    Args:
        hidden_size: D.
        heads, head_dim, expand_v: value heads, key width, value width over key width; see `Heads.of`.
        conv: taps of the short convolution, 0 for none.
        gate: of the output, "silu" or "sigmoid"; none as published.
        negative_eigenvalues: gains up to 2.
        norm_eps: of the output norm.
        kernel: pin a kernel of `kalmix.ops.delta`.

    Cost: O(T K V) a head and the projections; the state is `[G, K, V]` and the convolution's window.
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
