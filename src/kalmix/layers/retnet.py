"""Retention (RetNet): a memory with a fixed decay per head and rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix import designs
from kalmix.designs import Design
from kalmix.distributed import ops
from kalmix.distributed.entry import past_tokens
from kalmix.errors import ArgumentError
from kalmix.layers.base import check_state_tensor
from kalmix.layers.fused.rotary_step import can_fuse_rotary, rotary_step
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import apply_rotary
from kalmix.segments import Segments, of_tokens
from kalmix.steps import Slots, store_rows
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import check_number


class RetNet(MemoryLayer):
    """Multi-scale retention: head h decays by 1 - 2^(-5 - h) per token; q and k have rotary positions.

    Paper: [Retentive Network](https://arxiv.org/abs/2307.08621).

        M_t = (1 - 2^(-5 - h)) M_{t-1} + k_t v_t',   read_t = M_t' q_t / sqrt(K)
        y = out(norm(read) * SiLU(gate(x)))

    h counts heads from 0. M' is the transpose of M, and M_0 = 0. The norm is an RMS norm of each head with a learned
    scale. q and k are rotated: columns j and j + K / 2 by `rotary_base`^(-2 j / K) radians per token. Positions count
    the tokens of each sequence from 0.

    The layer has no posterior: `layer.filter(x, variance=True)` returns `None` as variance.

    Args:
        hidden_size: D.
        heads: number of heads, G. Default: D / K, rounded, at least 1.
        head_dim: key width, K; even. Default: D / G, rounded down, if `heads` is given; otherwise the largest power of
            two that is at most min(D / 4, 128), but at least 2.
        expand_v: V / K, value width divided by key width, > 0. V must be an integer.
        gate: activation of the output gate, "silu" or "sigmoid"; `None` for no gate.
        rotary_base: base of the rotation, > 0.
        norm_eps: epsilon of the output norm, >= 0.
        kernel: name of a kernel of `kalmix.ops.additive`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value, or K is odd; or, in a call, x, state or segments has the
            wrong type, shape, dtype or device, or x is not finite (checked on a CPU).
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`, in the dtype of the parameters;
        under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `state` is a `MemoryState`: `belief.mean` is M, `[N, G, K, V]` in float32 (float64 for float64 inputs), and
        `conv_state` the number of past tokens of each sequence, int64 `[N]`.

    Complexity: O(T K V) per head, and the projections.

    Example:
        >>> from kalmix.layers import RetNet
        >>> y, state = RetNet(64, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape, state.belief.mean.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 2, 32, 64]))
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
        self.first_head = 0  # of this rank, where ranks divide the heads

    def keep_heads(self, ranks: int, rank: int) -> None:
        """Change sizes to those of the heads of one rank."""
        super().keep_heads(ranks, rank)
        self.first_head = rank * self.sizes.heads

    def normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scale q by 1 / sqrt(K)."""
        return q * q.shape[-1] ** -0.5, k

    def project(
        self,
        x: Tensor,
        conv_state: Tensor | None,
        segments: Segments | None,
        segment_ids: Tensor | None,
        slots: Slots | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute rotated q and k, and v; the state is the number of past tokens, int64 `[N]`."""
        q, k, v, _ = super().project(x, None, segments, segment_ids)
        if slots is not None and conv_state is not None:
            if can_fuse_rotary(q, k):
                return *rotary_step(q, k, conv_state, slots, self.rotary_base), v, conv_state
            past = conv_state[slots.read.clamp(min=0)]
            store_rows((conv_state,), slots, (past + 1,))
            q, k = apply_rotary(q, k, past[:, None], self.rotary_base)
            return q, k, v, conv_state
        if conv_state is not None:
            sizes = {"N": x.shape[0] if segments is None else segments.count}
            check_state_tensor("conv_state", conv_state, "N", sizes, (torch.int64,), x)
        else:
            conv_state = past_tokens()
        token = torch.arange(x.shape[1], device=x.device)
        if segments is None or segment_ids is None:
            past = token.new_zeros(x.shape[0]) if conv_state is None else conv_state
            position = token[None] if conv_state is None else past[:, None] + token
            after = past + x.shape[1]
        else:
            _, start, stop = segments.rows.long().unbind(1)
            past = torch.zeros_like(start) if conv_state is None else conv_state
            position, after = token + of_tokens(past - start, segment_ids), past + stop - start
        return *apply_rotary(q, k, position, self.rotary_base), v, after

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Return the fixed log-decays, `[B, T, G]`."""
        head = self.first_head + torch.arange(self.sizes.heads, device=x.device, dtype=belief_dtype(x.dtype))
        return {"log_decay": torch.log1p(-(2.0 ** (-5 - head))).expand(*x.shape[:2], -1)}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Call `kalmix.ops.additive`."""
        return ops.additive(q, k, v, **arguments)
