"""Gated KalmaNet: ridge regression over the past at every token, around the op `ridge`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kalmix import designs
from kalmix.designs import Design, Transition
from kalmix.distributed import ops
from kalmix.layers.config_io import ridge_from_config, solver_from_config
from kalmix.layers.fused import UnitNorm
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import to_state_dtype
from kalmix.layers.parametrize import StepDecay
from kalmix.layers.signal_groups import decay_signal, fused_signals, linear_signal
from kalmix.ops import Adaptive, Chebyshev, Ridge, Solver
from kalmix.types import Filtered
from kalmix.validation import check_choice

NORM_EPS = 1e-6  # as in the published code; added to the length of keys and to gains
GAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "squared": lambda raw: (torch.sigmoid(raw) + NORM_EPS).square(),
}


class GatedKalmaNet(MemoryLayer):
    """Gated KalmaNet: at every token, the ridge regression of past values on past keys, with exponential forgetting.

    Paper: [Gated KalmaNet](https://arxiv.org/abs/2511.21016), Figure 4, equations 3 and 55.

        H_t = a_t H_{t-1} + g_t k_t k_t',   U_t = a_t U_{t-1} + g_t k_t v_t'
        read = U_t' (m_t s_t + (1 - m_t) q_t),   (H_t + ridge_t I) s_t = q_t

    U' is the transpose of U, and H_0 and U_0 are 0. q and k are unit vectors. Each head computes from a token x_t a
    forgetting gate a_t = exp(-rate step_t) (gamma in the paper), a write gate g_t = sigmoid(project(x_t)) (beta) and a
    weight m_t = sigmoid(project(x_t)) of the solution s_t (alpha); each can be left out, which makes it 1. Default
    sizes are as published: 8 heads of width 128 at D = 1024, a ridge of 0.02 ||H||_F, and 30 Chebyshev iterations.

    `layer.filter(x, variance=True)` returns `kalmix.Filtered`: mean (y), variance `[B, T, D]` in float32 (float64 for
    float64 inputs), and belief (the state). The variance of a column of the read-out is q_t' s_t, for
    observation noise 1; it does not depend on m_t. Gate and output projection transform it exactly; the output norm
    transforms it approximately.

    Args:
        hidden_size: D.
        heads: number of value heads, G. Default: D / K, rounded.
        key_heads: number of heads of q and k, H, a divisor of `heads`; `heads` by default. Value head g uses key head
            g // (G / H).
        head_dim: key width, K. Default: D / heads, rounded down, if `heads` is given; otherwise the largest power of
            two that is at most min(D / 4, 128), but at least 2.
        expand_v: V / K, where V is the value width of a head; K * `expand_v` must be an integer.
        decay: whether there is a forgetting gate; without it all tokens have the same weight (appendix J.2).
        gain: write gate. "sigmoid" of a projection of x (equation 55); "squared", the square of that sigmoid, as in the
            published code, which multiplies both key and value by the sigmoid; `None` for 1.
        mix: whether to mix the solution with the query; otherwise only the solution is read (appendix J.3).
        ridge: `Adaptive(factor)`, or the factor as a number > 0, for a ridge of factor * ||H_t||_F (Frobenius norm); or
            `Fixed(value)`, both of `kalmix.ops`. Or, for configuration files, a name ("adaptive" or "fixed", with the
            default of the class) or a mapping such as `{"name": "fixed", "value": 0.1}`.
        solver: `Chebyshev`, `ConjugateGradient`, `Exact` or `Sketch` of `kalmix.ops`. Or a name ("chebyshev",
            "conjugate-gradient" or "exact") or a mapping such as `{"name": "chebyshev", "iterations": 20}`.
        conv: taps of the causal convolution over q, k and v, before SiLU; 0 for SiLU only.
        gate: activation of the output gate, "silu" or "sigmoid"; `None` for no gate.
        norm_eps: epsilon of the output norm.
        kernel: name of a kernel of `kalmix.ops.ridge`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value, or `key_heads` does not divide `heads`; or, in a call, x,
            state or segments has the wrong type, shape, dtype or device, or x is not finite (checked on a CPU).
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`, in the dtype of the parameters;
        under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `state` is a `MemoryState`: `belief.cross` is U, `[N, G, K, V]`, and `belief.gram` is H, `[N, G, K, K]`, in
        float32 (float64 for float64 inputs); `conv_state` is the last `conv - 1` inputs of the convolution.

    Complexity: O(T K (K r + V)) per head for r iterations, and the projections.

    Example:
        >>> from kalmix.layers import GatedKalmaNet
        >>> layer = GatedKalmaNet(64, heads=2)
        >>> y, state = layer(torch.randn(2, 16, 64))
        >>> y.shape, state.belief.gram.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 2, 32, 32]))
    """

    design: Design | None = designs.GATED_KALMANET
    has_posterior = True

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        key_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        decay: bool = True,
        gain: str | None = "sigmoid",
        mix: bool = True,
        ridge: Ridge | float | str | Mapping[str, object] = Adaptive(0.02),  # noqa: B008 - frozen
        solver: Solver | str | Mapping[str, object] = Chebyshev(30),  # noqa: B008 - frozen
        conv: int = 4,
        gate: str | None = "silu",
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        sizes = Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v, key_heads=key_heads)
        if gain is not None:
            check_choice("gain", gain, tuple(GAINS))
        super().__init__(hidden_size, sizes, conv=conv, gate=gate, norm_eps=norm_eps, kernel=kernel)
        self.gain = gain
        self.ridge: Ridge = ridge_from_config(ridge)
        self.solver: Solver = solver_from_config(solver)
        if not decay:
            self.design = replace(
                designs.GATED_KALMANET, name="gated-kalmanet without forgetting", transition=Transition()
            )
        self.decay: StepDecay | None = StepDecay(hidden_size, (sizes.heads,)) if decay else None
        self.gain_proj: nn.Linear | None = nn.Linear(hidden_size, sizes.heads) if gain is not None else None
        self.mix_proj: nn.Linear | None = nn.Linear(hidden_size, sizes.heads) if mix else None

    @property
    def unit_norm(self) -> UnitNorm:
        """Norm of the published code. Queries need no further scale, since the output norm removes it."""
        return UnitNorm(self.sizes.key_width, eps=NORM_EPS, eps_on_length=True)

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Compute log-decay, gain and mix `[B, T, G]`, as far as the layer has them."""
        groups = {}
        if self.decay is not None:
            groups["log_decay"] = decay_signal(self.decay)
        if self.gain_proj is not None:
            kind = str(self.gain)
            groups["gain"] = linear_signal(self.gain_proj, kind, NORM_EPS if kind == "squared" else 1.0)
        if self.mix_proj is not None:
            groups["mix"] = linear_signal(self.mix_proj, "sigmoid")
        fused = fused_signals(x, *groups.values())
        if fused is not None:
            return dict(zip(groups, fused, strict=True))
        signals = {} if self.decay is None else {"log_decay": self.decay.log_decay(x)}
        if self.gain_proj is not None:
            signals["gain"] = GAINS[str(self.gain)](to_state_dtype(self.gain_proj(x)))
        if self.mix_proj is not None:
            signals["mix"] = torch.sigmoid(to_state_dtype(self.mix_proj(x)))
        return signals

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of the statistics, and of one matrix-vector product per iteration of the solver."""
        iterations = getattr(self.solver, "iterations", 0)
        return super().flops_per_token(length) + 2.0 * iterations * self.sizes.heads * self.sizes.key_width**2

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Call `kalmix.ops.ridge`."""
        return ops.ridge(q, k, v, ridge=self.ridge, solver=self.solver, **arguments)
