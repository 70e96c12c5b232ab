"""Mamba-2: a state space model whose heads share queries and keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kalmix import designs
from kalmix.designs import Design
from kalmix.distributed import ops
from kalmix.errors import ArgumentError
from kalmix.layers.fused import Gate, Norm, rms_norm, without_storing
from kalmix.layers.head_sizes import Heads, divide_state
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.parametrize import StepDecay
from kalmix.layers.signal_groups import decay_signal, fused_signals
from kalmix.types import Filtered, replace_fields
from kalmix.validation import check_number, check_positive_int


class Mamba2(MemoryLayer):
    """Mamba-2: a state space model with a decay per head, a skip connection and a gated output.

    Paper: [Transformers are SSMs](https://arxiv.org/abs/2405.21060).

        C, B, v = SiLU(conv(project(x)));  M_t = exp(-rate step_t) M_{t-1} + step_t B_t v_t'
        y = out(norm((M_t' C_t + skip * v) * SiLU(gate(x))))

    This layer gates its own output: do not put an MLP after it. Use it alone in a residual block.

    C_t and B_t are query and key, shared by the heads of a group (by default by all heads). M' is the transpose of M,
    and M_0 = 0. Each head learns a rate > 0 and a skip (`D` in the published code), a scale that is initially 1.
    step_t = softplus(project(x_t) + bias) is one number per head. The norm is an RMS norm over the G V / `groups`
    values of the heads of a group, with a learned scale.

    The layer has no posterior: the `kalmix.Filtered` of `layer.filter(x, variance=True)` has variance `None`.

    Args:
        hidden_size: D.
        heads: number of value heads, G. Default: `expand` D / V, rounded, at least 1.
        head_dim: value width, V. Default: `expand` D / G, rounded down, at least 1, if `heads` is given; otherwise the
            largest power of two that is at most min(D / 4, 64), but at least 2.
        groups: number of pairs (C, B), a divisor of `heads`.
        state_dim: width of C and B, K, >= 1. Default: 128, or D if that is less.
        expand: G V / D, > 0; used if `heads` or `head_dim` is omitted.
        conv: taps of the causal convolution over C, B and v, before SiLU; 0 for SiLU only.
        norm_eps: epsilon of the output norm, >= 0.
        kernel: name of a kernel of `kalmix.ops.additive`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value; or, in a call, x, state or segments has the wrong type,
            shape, dtype or device, or x is not finite (checked on a CPU; the message names a projection, such as `q`).
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`, in the dtype of the parameters;
        under autocast x may have another, and y and `conv_state` have that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `state` is a `MemoryState`: `belief.mean` is M, `[N, G, K, V]` in float32 (float64 for float64 inputs), and
        `conv_state` the last inputs of the convolution, `[N, conv - 1, 2 groups K + G V]`; `[N, 0]` without it.

    Complexity: O(T K V) per head, and the projections.

    Example:
        >>> from kalmix.layers import Mamba2
        >>> y, state = Mamba2(64)(torch.randn(2, 16, 64))
        >>> y.shape, state.belief.mean.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 8, 64, 16]))
    """

    design: Design | None = designs.MAMBA2
    includes_mlp = True

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        groups: int = 1,
        state_dim: int | None = None,
        expand: float = 2.0,
        conv: int = 4,
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        check_number("expand", expand)
        values = Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=1.0, share=expand, max_width=64)
        check_positive_int("groups", groups)
        if values.heads % groups:
            raise ArgumentError("groups", got=groups, expected=f"a divisor of {values.heads} (heads)")
        state_dim = min(128, hidden_size) if state_dim is None else state_dim
        check_positive_int("state_dim", state_dim)
        options = {"conv": conv, "gate": "silu", "norm_eps": norm_eps, "kernel": kernel}
        super().__init__(
            hidden_size,
            replace_fields(values, key_heads=groups, key_width=state_dim),
            conv_bias=True,
            norm_width=0,
            **options,
        )
        self.decay: StepDecay = StepDecay(hidden_size, (values.heads,), min_rate=1.0)
        self.skip: nn.Parameter = nn.Parameter(torch.empty(values.heads))
        self.norm_scale: nn.Parameter = nn.Parameter(torch.empty(values.values))
        self.reset_parameters()

    @classmethod
    def options_for_state_size(
        cls,
        width: int,
        state: int,
        *,
        heads: int = 4,
        values: float = 1.0,
        head_dim: int | None = None,
        state_dim: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Return heads with `values * width` value columns in total, and the state dimension for `state` numbers."""
        check_positive_int("heads", heads)
        columns = head_dim or divide_state(width * values, heads)
        rows = state_dim or divide_state(state, heads * columns)
        return {"heads": heads, "head_dim": columns, "state_dim": rows}

    def reset_parameters(self) -> None:
        """Set the skip and the scale of the norm to 1."""
        nn.init.ones_(self.skip)
        nn.init.ones_(self.norm_scale)

    def normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return C and B unchanged."""
        return q, k

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Compute log-decays, and the steps as gains, `[B, T, G]`."""
        fused = fused_signals(x, decay_signal(self.decay, "decay-step"))
        if fused is not None:
            return dict(zip(("log_decay", "gain"), fused, strict=True))
        decay = self.decay(x)
        return {"log_decay": decay.log_decay, "gain": decay.step}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Call `kalmix.ops.additive` and add the skip."""
        output = ops.additive(q, k, v, **arguments)
        return replace_fields(output, mean=output.mean + self.skip.to(v.dtype)[:, None] * v)

    def project_out(self, readout: Tensor, context: tuple[Tensor | None, Tensor]) -> Tensor:
        """Apply gate, norm of each group, and output projection."""
        gate, _ = context
        assert gate is not None
        norm = Norm(self.sizes.values // self.sizes.key_heads, self.norm_eps)
        gated = partial(rms_norm, readout, self.norm_scale, norm, Gate(gate, "silu", first=True))
        return without_storing(gated, self.out_proj)
