"""The Bayesian Layer: a memory that knows how sure it is of every direction, and writes where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kalmix import designs, ops
from kalmix.designs import Design
from kalmix.errors import ArgumentError
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.parametrize import VARIANCES, NoiseVariance, StepDecay
from kalmix.types import Filtered
from kalmix.validation import check_positive_int


class BayesianLayer(MemoryLayer):
    """The Bayesian Layer of Memory by Design (Dowling et al., 2026): Proposition 1 in the place of a delta rule.

    The token sets both noises, softplus and a floor (appendix D), and by a step per head how far the transition goes:
    radius exp(-rate step) and angle frequency * step, with a rate and a frequency learned per key (appendix G's
    A_radius, A_angle and W_A). All else is as in `GatedDeltaNet`, sizes included, so that it can take its place.

    Args:
        hidden_size: D.
        heads, head_dim, expand_v: heads, key width, value width over key width; see `Heads.of`.
        groups: observation noises a head, each for as many columns of its values; a covariance each, too.
        rotations: whether keys turn: each is then the visible half of a pair, which doubles the rows of the memory.
        conv: taps of the short convolution, 0 for none.
        gate: of the output, "silu" or "sigmoid"; `None` for none.
        norm_eps: of the output norm.
        kernel: pin a kernel of `kalmix.ops.dense`.

    Cost: O(T K (K + V)) a head and the projections; the state is `[G, K, V]`, `[G, K, K]` and the convolution's window.
    """

    design: Design | None = designs.BAYESIAN
    has_posterior = True

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        groups: int = 1,
        rotations: bool = False,
        conv: int = 4,
        gate: str | None = "silu",
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        whole = Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v, share=0.75)
        check_positive_int("groups", groups)
        if whole.value_width % groups:
            raise ArgumentError("groups", got=groups, expected=f"a divisor of {whole.value_width} (columns of a head)")
        sizes = whole._replace(heads=whole.heads * groups, value_width=whole.value_width // groups)
        options = {"conv": conv, "gate": gate, "norm_eps": norm_eps, "kernel": kernel}
        super().__init__(hidden_size, sizes, norm_width=whole.value_width, **options)
        self.groups = groups
        self.rotations = rotations
        self.decay: StepDecay = StepDecay(
            hidden_size, (whole.heads, whole.key_width), (whole.heads, 1), rotates=rotations
        )
        self.process_noise: NoiseVariance = NoiseVariance(hidden_size, whole.heads, **VARIANCES["process_noise"])
        self.obs_noise: NoiseVariance = NoiseVariance(hidden_size, sizes.heads, **VARIANCES["obs_noise"])

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Rates, frequencies and the bias of steps."""
        return self.decay.dynamics.parameters()

    def normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors; of pairs, the hidden halves are neither written nor read."""
        q, k = super().normalize_qk(q, k)
        width = self.sizes.key_width if self.rotations else 0
        return F.pad(q, (0, width)), F.pad(k, (0, width))

    @property
    def memory_shape(self) -> tuple[int, int]:
        """Rows and columns of a value head's memory: of a key that turns both halves."""
        return self.sizes.key_width * (1 + self.rotations), self.sizes.value_width

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Noises `[B, T, G]`; log-decays and, if keys turn, angles `[B, T, G, K]`. Groups differ in obs_noise only."""
        decay = self.decay(x)
        shared = {"log_decay": decay.log_decay, "angle": decay.angle, "process_noise": self.process_noise(x)}
        signals = {name: signal for name, signal in shared.items() if signal is not None}
        if self.groups > 1:
            signals = {name: signal.repeat_interleave(self.groups, dim=2) for name, signal in signals.items()}
        return signals | {"obs_noise": self.obs_noise(x)}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """`kalmix.ops.dense`."""
        return ops.dense(q, k, v, **arguments)
