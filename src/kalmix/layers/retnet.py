"""Retention (RetNet): a memory that decays at a rate fixed per head, addressed by rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix import designs, ops
from kalmix.designs import Design
from kalmix.errors import ArgumentError
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import apply_rotary
from kalmix.segments import Segments
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import check_number


class RetNet(MemoryLayer):
    """Multi-scale retention (Sun et al., 2023): head h decays by 1 - 2^(-5 - h), q and k turn with position (xPos).

    Positions count the tokens of a sequence: they start at 0 in each, and the state carries them on.

    Args:
        hidden_size: D.
        heads, head_dim, expand_v: value heads, key width (even), value width over key width; see `Heads.of`.
        gate: of the output, "silu" or "sigmoid"; `None` for none.
        rotary_base: the slowest rotation turns once in about 2 pi times this many tokens.
        norm_eps: of the output norm.
        kernel: pin a kernel of `kalmix.ops.additive`.

    Cost: O(T K V) a head and the projections; the state is `[G, K, V]` and a position.
    """

    design: Design | None = designs.RETNET

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        gate: str | None = "silu",
        rotary_base: float = 10000.0,
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        sizes = Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v)
        if sizes.key_width % 2:
            raise ArgumentError("head_dim", got=sizes.key_width, expected="an even number (keys rotate in pairs)")
        super().__init__(hidden_size, sizes, conv=0, activate=False, gate=gate, norm_eps=norm_eps, kernel=kernel)
        check_number("rotary_base", rotary_base)
        self.rotary_base = rotary_base

    def normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """As projected, q scaled by 1 / sqrt(K)."""
        return q * q.shape[-1] ** -0.5, k

    def project(
        self, x: Tensor, conv_state: Tensor | None, segments: Segments | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and k turned by the position of their token; carried on is how many tokens there were, int64 `[N]`."""
        q, k, v, _ = super().project(x, None, segments, segment_ids)
        token = torch.arange(x.shape[1], device=x.device)
        if segments is None or segment_ids is None:
            past = token.new_zeros(x.shape[0]) if conv_state is None else conv_state
            position, after = past[:, None] + token, past + x.shape[1]
        else:
            _, start, stop = segments.rows.long().unbind(1)
            past = torch.zeros_like(start) if conv_state is None else conv_state
            position, after = token + (past - start)[segment_ids.clamp(min=0)], past + stop - start
        return apply_rotary(q, position, self.rotary_base), apply_rotary(k, position, self.rotary_base), v, after

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """The fixed log-decays, `[B, T, G]`."""
        head = torch.arange(self.sizes.heads, device=x.device, dtype=belief_dtype(x.dtype))
        return {"log_decay": torch.log1p(-(2.0 ** (-5 - head))).expand(*x.shape[:2], -1)}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """`kalmix.ops.additive`."""
        return ops.additive(q, k, v, **arguments)
