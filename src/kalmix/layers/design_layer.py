"""Layer for any design, published or your own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from kalmix.designs import CATALOGUE, Covariance, Design, Evidence, Transition
from kalmix.distributed import ops
from kalmix.errors import ArgumentError
from kalmix.layers.base import check_kernel
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.parametrize import VARIANCES, CellDynamics, NoiseVariance, StepDecay, observation_precision
from kalmix.types import Filtered, replace_fields

PARTS: dict[str, type[Transition | Evidence | Covariance]] = {
    "transition": Transition,
    "evidence": Evidence,
    "covariance": Covariance,
}


class DesignLayer(MemoryLayer):
    """Layer for any design: computes the signals of the design from each token and calls `kalmix.filter`.

    Signals are the arguments of the design's op beside q, k and v, such as `log_decay`; `design.signals` names the
    required ones.

    Framework: Memory by Design: Probabilistic Sequence Layers (Dowling et al., 2026).

    Log-decays are -rate * step, with a learned rate and a step computed from the token (`StepDecay`). The variances
    `obs_noise`, `process_noise`, `write_variance` and `reset` are softplus(project(x) + bias) plus a lower bound.
    Evidence "cell" (an independent filter for each of the K V entries of a memory) differs: decay and process noise, if
    the design has them, are learned for each entry and do not depend on the token (`CellDynamics`); `precision` is
    computed from the token. The layer omits optional signals, so it filters a design with rotations without rotating.
    q and k are unit vectors; q is then divided by sqrt(K).

    If the design has one noise per value column (`evidence.columns`), the op receives G * V value heads of width 1,
    each with its own belief. The output norm is still that of G heads of width V.

    `layer.filter(x, variance=True)` returns the variance `[B, T, D]` of y if `design.has_variance`, otherwise `None`.

    Args:
        hidden_size: D.
        design: a `Design`, the name of one in `kalmix.designs.CATALOGUE`, or, for configuration files, a mapping of its
            fields as `dataclasses.asdict` returns: "transition", "evidence" and "covariance" are required.
        heads: number of value heads, G. Default: D / K, rounded.
        key_heads: number of heads of q and k, H, a divisor of `heads`; `heads` by default. Value head g uses key head
            g // (G / H).
        head_dim: key width, K. Default: D / heads, rounded down, if `heads` is given; otherwise the largest power of
            two that is at most min(D / 4, 128), but at least 2.
        expand_v: V / K, where V is the value width of a head; K * `expand_v` must be an integer.
        conv: taps of the causal convolution over q, k and v, before SiLU; 0 for SiLU only.
        gate: activation of the output gate, "silu" or "sigmoid"; `None` for no gate.
        norm_eps: epsilon of the output norm.
        kernel: name of a kernel of the design's op; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value, `design` is an unknown name or a mapping with wrong
            fields, its decay is "matrix" or "time" (as that of "afa"), or `key_heads` does not divide
            `heads`; or, in a call, x, state or segments has the wrong type, shape, dtype or device, or x is not finite
            (checked on a CPU).
        DesignError: a mapping has an unknown decay or kind, or no op filters its combination of parts.
        TypeError: an option or argument has an unknown name, or `design` is missing.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`, in the dtype of the parameters;
        under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `state` is a `MemoryState`: `belief`, the belief of the design's op for G value heads (G * V with
        `evidence.columns`), and `conv_state`, the last `conv - 1` inputs of the convolution.

    Complexity: that of the design's op, and the projections.

    Example:
        >>> from kalmix.designs import Covariance, Design, Evidence, Transition
        >>> from kalmix.layers import DesignLayer
        >>> design = Design("mine", Transition("head", diffusion=True), Evidence("memory"), Covariance("dense"))
        >>> y, state = DesignLayer(64, design=design, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape, state.belief.covariance.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 2, 32, 32]))
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        design: Design | str | Mapping[str, object],
        heads: int | None = None,
        key_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        conv: int = 4,
        gate: str | None = "silu",
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        design = design_from_config(design)
        if design.transition.decay in ("matrix", "time"):
            got = f"{design.name!r}, whose transition {design.transition.description}"
            raise ArgumentError("design", got=got, expected="a transition per head, key or cell")
        check_kernel(design, kernel)
        sizes = head_sizes = Heads.of(
            hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v, key_heads=key_heads
        )
        if design.evidence.columns:
            sizes = replace_fields(head_sizes, heads=head_sizes.values, value_width=1)
        options = {"conv": conv, "gate": gate, "norm_eps": norm_eps, "kernel": kernel}
        super().__init__(hidden_size, sizes, norm_width=head_sizes.value_width, **options)
        self.design: Design = design  # pyright: ignore[reportIncompatibleVariableOverride] # never absent
        self.has_posterior: bool = design.has_variance
        self.dynamics: CellDynamics | None = None
        self.decay: StepDecay | None = None
        self.precision_proj: nn.Linear | None = None
        signal_names, transition = list(design.signals), design.transition
        if design.evidence.kind == "cell":
            signal_names.clear()
            self.precision_proj = nn.Linear(hidden_size, sizes.values, bias=False)
            if transition.signals:
                cells = sizes.heads * sizes.key_width
                self.dynamics = CellDynamics(cells, sizes.value_width, process_noise=transition.diffusion)
        elif transition.decay != "none":
            per_head, per_key = (sizes.heads,), transition.decay == "key"
            rates, steps = ((*per_head, sizes.key_width), (*per_head, 1)) if per_key else (per_head, per_head)
            self.decay = StepDecay(hidden_size, rates, steps)
        variances = {n: NoiseVariance(hidden_size, sizes.heads, **VARIANCES[n]) for n in signal_names if n in VARIANCES}
        self.variances: nn.ModuleDict = nn.ModuleDict(variances)

    def dynamics_parameters(self) -> Iterator[nn.Parameter]:
        """Return rates, step biases and noises of the transition.

        Rates per head or key are left out if the design has no process noise, as by `GatedDeltaNet`: published code
        gives them no lower learning rate.
        """
        dynamics = self.dynamics
        if self.decay is not None and self.design.transition.diffusion:
            dynamics = self.decay.dynamics
        return iter(()) if dynamics is None else dynamics.parameters()

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the signals of the design: `[B, T, G]`, `[B, T, G, K]`, or as `kalmix.ops.diagonal` takes them."""
        signals = {name: noise(x) for name, noise in self.variances.items()}
        if self.decay is not None:
            signals["log_decay"] = self.decay.log_decay(x)
        if self.precision_proj is not None:
            precision = observation_precision(self.precision_proj(x))
            signals["precision"] = precision.unflatten(-1, (self.sizes.heads, -1))
            if self.dynamics is not None:
                dynamics = zip(("log_decay", "process_noise"), self.dynamics(precision.dtype), strict=True)
                signals |= {n: s.view(*self.sizes[1:]) for n, s in dynamics if n in self.design.signals}
        return signals

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Call `kalmix.filter` under the design."""
        return ops.filter(self.design, q, k, v, **arguments)


def design_from_config(value: object) -> Design:
    """Build a design from a design, its name in the catalogue, or a mapping of its fields.

    Raises:
        ArgumentError: `value` is none of these.
        DesignError: no op filters this combination of parts.
    """
    if isinstance(value, Design):
        return value
    if isinstance(value, str) and value in CATALOGUE:
        return CATALOGUE[value]
    expected = f"a Design, a mapping of {', '.join(PARTS)}, or one of {', '.join(map(repr, CATALOGUE))}"
    if not isinstance(value, Mapping) or not PARTS.keys() <= value.keys():
        raise ArgumentError("design", got=repr(value), expected=expected)
    try:
        parts = {name: part(**value[name]) for name, part in PARTS.items()}
        return Design(**{"name": "your own", **value, **parts})
    except TypeError as error:
        raise ArgumentError("design", got=f"{value!r} ({error})", expected=expected) from None
