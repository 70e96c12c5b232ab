"""Gated KalmaNet: a memory that is solved for, from all that was seen, at every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kalmix import designs, ops
from kalmix.designs import Design, Transition
from kalmix.layers.config_io import ridge_from_config, solver_from_config
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import to_state_dtype
from kalmix.layers.parametrize import StepDecay
from kalmix.ops import Adaptive, Chebyshev, Ridge, Solver
from kalmix.types import Filtered
from kalmix.validation import check_choice

NORM_EPS = 1e-6  # of the published code, in the length of keys and in gains
GAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "squared": lambda raw: (torch.sigmoid(raw) + NORM_EPS).square(),
}


class GatedKalmaNet(MemoryLayer):
    """Gated KalmaNet (arXiv:2511.21016, Figure 4 and equation 55): ridge regression over the whole past.

        H_t = a_t H_{t-1} + g_t k_t k_t',   U_t = a_t U_{t-1} + g_t k_t v_t'
        read = U_t' (m_t x_t + (1 - m_t) q_t),   (H_t + ridge I) x_t = q_t

    with unit q and k, neither scaled, and per head a forgetting gate a, a write gate g and a connection m from the
    query past the solver (the paper's gamma, beta and alpha), each of which can be left out. Omitted sizes are as
    published: heads 128 wide that together take D (8 at D = 1024), a ridge of 0.02 ||H||_F, 30 Chebyshev iterations.

    Its posterior is that of the read-out x'U for values of noise 1.

    Args:
        hidden_size: D.
        heads, head_dim, expand_v: value heads, key width, value width over key width; see `Heads.of`.
        key_heads: key heads, a divisor of `heads`; as many if absent. Keys are shared, not copied.
        decay: whether the past fades; without, all tokens weigh the same (appendix J.2).
        gain: "sigmoid" of a projection of x as in equation 55; "squared", that sigmoid squared, as published code
            has it, where the gate scales key and value both; `None` for 1.
        mix: whether there is a connection past the solver; without, the solution alone is read (appendix J.3).
        ridge: `Adaptive(a)`, which a bare number means, or `Fixed(value)`; also as `spelling.spell` gives it.
        solver: a solver of `kalmix.ops`; also as `spelling.spell` gives it.
        conv: taps of the short convolution, 0 for none.
        gate: of the output, "silu" or "sigmoid"; `None` for none.
        norm_eps: of the output norm.
        kernel: pin a kernel of `kalmix.ops.ridge`.

    Raises:
        ArgumentError: an option is not as above.

    Cost: O(T K (K r + V)) a head for r iterations, and the projections; the state is `[G, K, V]`, `[G, K, K]` and the
    convolution's window.
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

    def normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors, not scaled: a longer query is a longer answer, which the norm behind it takes back."""
        return _normalize(q), _normalize(k)

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Those of log-decay, gain and mix that the layer has, `[B, T, G]`."""
        signals = {} if self.decay is None else {"log_decay": self.decay(x).log_decay}
        if self.gain_proj is not None:
            signals["gain"] = GAINS[str(self.gain)](to_state_dtype(self.gain_proj(x)))
        if self.mix_proj is not None:
            signals["mix"] = torch.sigmoid(to_state_dtype(self.mix_proj(x)))
        return signals

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """`kalmix.ops.ridge`."""
        return ops.ridge(q, k, v, ridge=self.ridge, solver=self.solver, **arguments)


def _normalize(x: Tensor) -> Tensor:
    """x / (|x| + eps), as published, in float32 inside. The zero vector stays zero."""
    x_state = to_state_dtype(x)
    return (x_state / (torch.linalg.vector_norm(x_state, dim=-1, keepdim=True) + NORM_EPS)).to(x.dtype)
