"""Gated linear attention (GLA): a memory with a decay per key that depends on the token."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kalmix import designs
from kalmix.designs import Design
from kalmix.distributed import ops
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import low_rank, to_state_dtype
from kalmix.types import Filtered
from kalmix.validation import check_number, check_positive_int


class GLA(MemoryLayer):
    """Gated linear attention: a decay per key column that depends on the token, and a gated output.

    Paper: [Gated Linear Attention Transformers](https://arxiv.org/abs/2312.06635).

        log a_t = logsigmoid(low_rank(x_t)) / temperature
        M_t = diag(a_t) M_{t-1} + k_t v_t',   read = M_t' q_t / sqrt(K)

    M' is the transpose of M, and M_0 = 0. q and k are not normalised. Default sizes are as published: the keys of all
    heads have D / 2 columns, the values D.

    The layer has no posterior: `layer.filter(x, variance=True)` returns `None` as variance.

    Args:
        hidden_size: D.
        heads: number of heads, G. Default: D / (2 K), rounded.
        head_dim: key width, K. Default: D / (2 heads), rounded down, if `heads` is given; otherwise the largest power
            of two that is at most min(D / 4, 128), but at least 2.
        expand_v: V / K, where V is the value width of a head; K * `expand_v` must be an integer.
        conv: taps of a causal convolution over q, k and v, followed by SiLU; 0 for neither, as published.
        gate: activation of the output gate, "silu" or "sigmoid"; `None` for no gate.
        rank: rank of the projection to decays.
        temperature: divisor of the log-decays; a larger one makes the memory decay more slowly.
        norm_eps: epsilon of the output norm.
        kernel: name of a kernel of `kalmix.ops.additive`; by default chosen by device, dtype and shape.

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
        `conv_state` the last `conv - 1` inputs of the convolution, `[N, 0]` without it.

    Complexity: O(T K V) per head, and the projections.

    Example:
        >>> from kalmix.layers import GLA
        >>> y, state = GLA(64, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape, state.belief.mean.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 2, 16, 32]))
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
        """Scale q by 1 / sqrt(K)."""
        return q * q.shape[-1] ** -0.5, k

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Compute log-decays, `[B, T, G, K]`."""
        raw = to_state_dtype(self.decay_proj(x)).unflatten(-1, (self.sizes.heads, -1))
        return {"log_decay": F.logsigmoid(raw) / self.temperature}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Call `kalmix.ops.additive`."""
        return ops.additive(q, k, v, **arguments)
