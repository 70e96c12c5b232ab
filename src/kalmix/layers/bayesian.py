"""The Bayesian Layer: a memory with a covariance between keys, around the op `dense`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kalmix import designs
from kalmix.designs import Design
from kalmix.distributed import ops
from kalmix.errors import ArgumentError
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.parametrize import VARIANCES, NoiseVariance, StepDecay
from kalmix.layers.signal_groups import decay_signal, fused_signals, noise_signal
from kalmix.types import Filtered, replace_fields
from kalmix.validation import check_positive_int


class BayesianLayer(MemoryLayer):
    """Bayesian Layer: a memory matrix with an exact posterior covariance between keys.

    Paper: Memory by Design: Probabilistic Sequence Layers (Dowling et al., 2026), Proposition 1, equations 9 to 13.

    The layer computes from each token a process noise and a step per head, and an observation noise per group. A noise
    is a softplus plus a lower bound (appendix D). The decay is exp(-rate * step). With rotations, the angle is the
    product of frequency and step. Each head learns one rate; with rotations, a rate and a frequency for each of the K
    columns of its keys. `decays_per_head="key"` gives each column a rate, as in the paper (appendices D and G). The
    prior of a memory has mean 0 and covariance I.

    q, k and v come from projections, a short convolution and SiLU. q and k are scaled to unit length; q is then divided
    by sqrt(K). The output is projected from the normalised read-out times its gate, as in `GatedDeltaNet`.

    `layer.filter(x, variance=True)` returns `kalmix.Filtered`: mean (y), variance `[B, T, D]` in float32 (float64 for
    float64 inputs), and belief (the state). The variance is that of each element of y under the
    posterior of the memory, without observation noise. The columns of a read-out are independent, so gate and output
    projection transform it exactly; the output norm transforms it approximately.

    Args:
        hidden_size: D.
        heads: number of heads, G. Default: 0.75 D / K, rounded.
        head_dim: key width, K. Default: 0.75 D / heads, rounded down, if `heads` is given; otherwise the largest power
            of two that is at most min(D / 4, 128), but at least 2.
        expand_v: V / K, where V is the value width of a head; K * `expand_v` must be an integer.
        groups: number of observation noises per head, each for V / groups value columns. Each group has its own
            covariance.
        decays_per_head: number of rates per head, or "key" for K; each serves K / `decays_per_head` adjacent columns of
            the keys. It must divide K. Default: 1; "key" with rotations, which require it. The paper has "key";
            kernels on a GPU are faster for 1.
        rotations: whether the rows of the memory rotate in pairs. If so, the memory has R = 2 K rows: row j rotates
            with row j + K, and keys and queries multiply the first K rows only. Otherwise R = K.
        conv: taps of the causal convolution over q, k and v, before SiLU; 0 for SiLU only.
        gate: activation of the output gate, "silu" or "sigmoid"; `None` for no gate.
        norm_eps: epsilon of the output norm.
        kernel: name of a kernel of `kalmix.ops.dense`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value, `groups` does not divide V, or `decays_per_head` does not
            divide K; or, in a call, x, state or segments has the wrong type, shape, dtype or device, or x is not finite
            (checked on a CPU).
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`, in the dtype of the parameters;
        under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `state` is a `MemoryState`: `belief.mean` `[N, G * groups, R, V / groups]` and `belief.covariance`
        `[N, G * groups, R, R]`, in float32 (float64 for float64 inputs), and `conv_state`, the last `conv - 1` inputs
        of the convolution. Group j of head g has index `g * groups + j`.

    Complexity: O(T R (groups R + V)) per head, and the projections.

    Example:
        >>> from kalmix.layers import BayesianLayer
        >>> layer = BayesianLayer(64, heads=2)
        >>> y, variance, state = layer.filter(torch.randn(2, 16, 64), variance=True)
        >>> variance.shape, state.belief.covariance.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 2, 24, 24]))
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
        decays_per_head: int | str | None = None,
        rotations: bool = False,
        conv: int = 4,
        gate: str | None = "silu",
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        head_sizes = Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v, share=0.75)
        check_positive_int("groups", groups)
        if head_sizes.value_width % groups:
            raise ArgumentError(
                "groups", got=groups, expected=f"a divisor of {head_sizes.value_width} (columns of a head)"
            )
        rates = count_rates(decays_per_head, head_sizes.key_width, rotations)
        sizes = replace_fields(
            head_sizes, heads=head_sizes.heads * groups, value_width=head_sizes.value_width // groups
        )
        options = {"conv": conv, "gate": gate, "norm_eps": norm_eps, "kernel": kernel}
        super().__init__(hidden_size, sizes, norm_width=head_sizes.value_width, **options)
        self.groups = groups
        self.decays_per_head = rates
        self.rotations = rotations
        self.decay: StepDecay = StepDecay(
            hidden_size, (head_sizes.heads, rates), (head_sizes.heads, 1), rotates=rotations
        )
        self.process_noise: NoiseVariance = NoiseVariance(hidden_size, head_sizes.heads, **VARIANCES["process_noise"])
        self.obs_noise: NoiseVariance = NoiseVariance(hidden_size, sizes.heads, **VARIANCES["obs_noise"])

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Return rates, frequencies and the bias of steps."""
        return self.decay.dynamics.parameters()

    @property
    def memory_shape(self) -> tuple[int, int]:
        """Rows and columns of the memory of one value head; with rotations there are 2 K rows."""
        return self.sizes.key_width * (1 + self.rotations), self.sizes.value_width

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Compute noises `[B, T, G]`, log-decays `[B, T, G, K]` and, with rotations, angles `[B, T, G, K]`.

        With one decay per head, log-decays are `[B, T, G]`. The groups of a head share all but the observation noise.
        """
        width = self.sizes.key_width
        log_decay, angle, process_noise, obs_noise = self._per_token(x)
        if self.decays_per_head == 1 < width:
            log_decay = log_decay.squeeze(-1)
        elif self.decays_per_head < width:
            log_decay = log_decay.repeat_interleave(width // self.decays_per_head, dim=-1)
        shared = {"log_decay": log_decay, "angle": angle, "process_noise": process_noise}
        signals = {name: signal for name, signal in shared.items() if signal is not None}
        if self.groups > 1:
            signals = {name: signal.repeat_interleave(self.groups, dim=2) for name, signal in signals.items()}
        return signals | {"obs_noise": obs_noise}

    def _per_token(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return log-decays, angles (`None` without rotations), process noises and observation noises."""
        noises = noise_signal(self.process_noise), noise_signal(self.obs_noise)
        if not self.rotations:
            fused = fused_signals(x, decay_signal(self.decay), *noises)
            if fused is not None:  # the kernel for decoding also multiplies steps and rates
                return fused[0].view(*x.shape[:2], *self.decay.rates), None, fused[1], fused[2]
        fused = fused_signals(x, decay_signal(self.decay, "softplus"), *noises)
        if fused is None:
            decay, process_noise, obs_noise = self.decay(x), self.process_noise(x), self.obs_noise(x)
        else:
            step, process_noise, obs_noise = fused
            decay = self.decay.apply_rates(step)
        return decay.log_decay, decay.angle, process_noise, obs_noise

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Call `kalmix.ops.dense`; with rotations, append the hidden half of q and k, which is 0."""
        if self.rotations:
            q, k = (F.pad(x, (0, self.sizes.key_width)) for x in (q, k))
        return ops.dense(q, k, v, **arguments)


def count_rates(decays_per_head: int | str | None, width: int, rotations: bool) -> int:
    """Return the number of decay rates of a head.

    Args:
        decays_per_head: the number, or "key" for `width`; `None` for the default of `BayesianLayer`.
        width: columns of a key.
        rotations: whether there is a frequency for each rate.

    Raises:
        ArgumentError: it is neither "key" nor a number that divides `width`, or with rotations it is not `width`.
    """
    chosen = ("key" if rotations else 1) if decays_per_head is None else decays_per_head
    rates = width if chosen == "key" else chosen
    accepted = f"{width} or 'key' with rotations" if rotations else f"'key' or a divisor of {width} (columns of a key)"
    if not isinstance(rates, int):
        raise ArgumentError("decays_per_head", got=repr(rates), expected=accepted)
    check_positive_int("decays_per_head", rates)
    if width % rates or (rotations and rates != width):
        raise ArgumentError("decays_per_head", got=rates, expected=accepted)
    return rates
