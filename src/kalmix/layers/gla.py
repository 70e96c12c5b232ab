"""Gated linear attention (GLA): a memory that adds, in which every key decays as the token says."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kalmix import designs, ops
from kalmix.designs import Design
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import low_rank, to_state_dtype
from kalmix.types import Filtered
from kalmix.validation import check_number, check_positive_int


class GLA(MemoryLayer):
    """Gated linear attention (Yang et al., 2024): log-decays logsigmoid(low rank(x)) / 16 per key, gated output.

    Omitted sizes are as published: keys take half of D, values all of it.

    Args:
        hidden_size: D.
        heads, head_dim, expand_v: value heads, key width, value width over key width; see `Heads.of`.
        conv: taps of a short convolution with SiLU behind it; none as published.
        gate: of the output, "silu" or "sigmoid"; `None` for none.
        rank: of the projection to decays.
        temperature: what their logarithms are divided by: the larger, the slower memory fades.
        norm_eps: of the output norm.
        kernel: pin a kernel of `kalmix.ops.additive`.

    Cost: O(T K V) a head and the projections; the state is `[G, K, V]` and the convolution's window.
    """

    design: Design | None = designs.GLA

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        conv: int = 0,
        gate: str | None = "silu",
        rank: int = 16,
        temperature: float = 16.0,
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        sizes = Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v, share=0.5)
        check_positive_int("rank", rank)
        super().__init__(hidden_size, sizes, conv=conv, activate=conv > 0, gate=gate, norm_eps=norm_eps, kernel=kernel)
        check_number("temperature", temperature)
        self.temperature = temperature
        self.decay_proj: nn.Sequential = low_rank(hidden_size, rank, sizes.heads * sizes.key_width, bias=True)

    def normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """As projected, q scaled by 1 / sqrt(K)."""
        return q * q.shape[-1] ** -0.5, k

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Log-decays, `[B, T, G, K]`."""
        raw = to_state_dtype(self.decay_proj(x)).unflatten(-1, (self.sizes.heads, -1))
        return {"log_decay": F.logsigmoid(raw) / self.temperature}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """`kalmix.ops.additive`."""
        return ops.additive(q, k, v, **arguments)
