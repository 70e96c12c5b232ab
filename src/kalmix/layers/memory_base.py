"""Base class of layers with a matrix memory: projections, short convolution, op, output norm and gate."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.beliefs import detach, loadable, take, to
from kalmix.distributed.tensor_parallel import SHARED, Plan, Split, check_divides
from kalmix.layers.base import Mixer, check_state, check_state_tensor
from kalmix.layers.branches import run_branches
from kalmix.layers.fused import ACTIVATIONS, Gate, QueryKeyColumns, UnitNorm, rms_norm, without_storing
from kalmix.layers.head_sizes import Heads, divide_state
from kalmix.layers.modules import RMSNorm, ShortConvolution, is_plain, linear_variance, low_rank, norm_weight
from kalmix.layers.parametrize import StepDecay
from kalmix.segments import Segments, mask_outside
from kalmix.steps import Slots
from kalmix.types import Belief, Filtered, without_autocast
from kalmix.validation import FLOATS, check_choice, check_number, check_positive_int


@loadable
class MemoryState(NamedTuple):
    """State of a memory layer: N sequences after their last token. A layer checks the fields; this class does not.

    Attributes:
        belief: `RidgeBelief` for `GatedKalmaNet`, `DenseBelief` for `BayesianLayer`, that of the design for
            `DesignLayer`, `PointBelief` otherwise; in float32 (float64 if the inputs are float64).
        conv_state: last `conv - 1` inputs of the short convolution over q, k and v, oldest first,
            `[N, conv - 1, channels]`; 0 before the first token, `[N, 0]` if the layer has no convolution. The layer
            returns it in the dtype of its projections (bfloat16 under autocast to bfloat16). A `RetNet`, which has no
            convolution, stores the number of past tokens here, int64 `[N]`.

    Example:
        >>> from kalmix.layers import GatedDeltaNet
        >>> _, state = GatedDeltaNet(64, heads=4, head_dim=8, expand_v=2)(torch.randn(3, 10, 64))
        >>> state.belief.mean.shape, state.conv_state.shape  # channels: 4 heads of 8 + 8 + 16
        (torch.Size([3, 4, 8, 16]), torch.Size([3, 3, 128]))
    """

    belief: Any  # a Belief
    conv_state: Tensor

    take = take
    to = to
    detach = detach


class MemoryLayer(Mixer):
    """Layer that writes values along keys into a memory and reads it along queries.

        q, k, v = SiLU(conv(project(x)));  q, k = normalize_qk(q, k)
        y = out(norm(op(q, k, v, signals(x))) * gate(x))

    A subclass implements `signals` and `op`, and `normalize_qk` unless q and k are unit vectors. Beliefs, decays, gains
    and noises are float32, also under autocast.

    Args:
        hidden_size: D.
        sizes: number and widths of the heads.
        conv: taps of the causal convolution over q, k and v; 0 for none.
        conv_bias: whether the convolution has a bias.
        activate: whether SiLU follows the convolution.
        gate: activation of the output gate, "silu" or "sigmoid"; `None` for no gate.
        gate_rank: rank of the projection to the gate, which then has a bias; full rank without a bias by default.
        norm_width: columns that the output norm normalises together. Default: those of a head; 0 for no norm.
        norm_eps: epsilon of the output norm.
        kernel: name of a kernel of the op; by default chosen by device, dtype and shape.
    """

    def __init__(
        self,
        hidden_size: int,
        sizes: Heads,
        *,
        conv: int = 4,
        conv_bias: bool = False,
        activate: bool = True,
        gate: str | None = None,
        gate_rank: int | None = None,
        norm_width: int | None = None,
        norm_eps: float = 1e-5,
        kernel: str | None = None,
    ) -> None:
        super().__init__(hidden_size)
        check_number("norm_eps", norm_eps, minimum=0.0)
        if conv != 0:
            check_positive_int("conv", conv)
        if gate is not None:
            check_choice("gate", gate, tuple(ACTIVATIONS))
        self.sizes = sizes
        self.activate = activate
        self.gate = gate
        self.kernel = kernel
        self.norm_width: int = sizes.value_width if norm_width is None else norm_width
        self.norm_eps = norm_eps
        channels = 2 * sizes.keys + sizes.values
        self.qkv_proj: nn.Linear = nn.Linear(hidden_size, channels, bias=False)
        self.conv: ShortConvolution | None = None
        if conv:
            self.conv = ShortConvolution(channels, conv, conv_bias, "silu" if activate else None)
        self.gate_proj: nn.Module | None = None
        if gate is not None and gate_rank is None:
            self.gate_proj = nn.Linear(hidden_size, sizes.values, bias=False)
        elif gate is not None and gate_rank is not None:
            self.gate_proj = low_rank(hidden_size, gate_rank, sizes.values, bias=True)
        self.norm: RMSNorm | None = RMSNorm(self.norm_width, norm_eps) if self.norm_width else None
        self.out_proj: nn.Linear = nn.Linear(sizes.values, hidden_size, bias=False)

    @classmethod
    def options_for_state_size(
        cls,
        width: int,
        state: int,
        *,
        heads: int = 4,
        values: float = 1.0,
        head_dim: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Return heads with `values * width` value columns in total, and the key width for a state of `state` numbers.

        If the belief has a covariance, keys are as wide as values, so each head holds two square matrices.
        """
        check_positive_int("heads", heads)
        if cls.design is not None and cls.design.covariance.elements(1, 1):
            return {"heads": heads, "head_dim": head_dim or isqrt(divide_state(state, 2 * heads)), "expand_v": 1.0}
        columns = divide_state(width * values, heads)
        keys = head_dim or divide_state(state, heads * columns)
        return {"heads": heads, "head_dim": keys, "expand_v": columns / keys}

    def head_plan(self, ranks: int) -> Plan:
        """Return how ranks divide the parameters: by key heads, with the value heads that read them."""
        sizes = self.sizes
        check_divides(self, "key heads", sizes.key_heads, ranks)
        plan: Plan = {name: Split(0, (len(x),)) for name, x in self.named_parameters()}  # one row or more per head
        for name in plan:
            if name.startswith(("qkv_proj.", "conv.")):
                plan[name] = Split(0, (sizes.keys, sizes.keys, sizes.values))
            elif name == "norm.weight" or name.endswith(".0.weight"):  # of each head; first factor of low rank
                plan[name] = SHARED
        return plan | {"out_proj.weight": Split(1, (sizes.values,))}

    def keep_heads(self, ranks: int, rank: int) -> None:
        """Change sizes to those of the heads of one rank."""
        super().keep_heads(ranks, rank)
        for module in self.modules():
            if isinstance(module, StepDecay):
                module.keep_heads(ranks)
        if self.conv is not None:
            self.conv.channels //= ranks

    @abstractmethod
    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the arguments of the op beside q, k and v from tokens `x` `[B, T, D]`."""

    @abstractmethod
    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Call the op with q, k `[B, T, H, K]`, v `[B, T, G, V]`, `signals`, a belief and segments; in steps, slots."""

    @property
    def unit_norm(self) -> UnitNorm:
        """Norm of queries and keys, unless the layer overrides `normalize_qk`: unit vectors, queries / sqrt(K)."""
        return UnitNorm(self.sizes.key_width, self.sizes.key_width**-0.5)

    def normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys `[B, T, H, K]`, by default by `unit_norm`.

        `project` calls this method only if a layer overrides it. Otherwise the short convolution applies `unit_norm`,
        in one kernel on a GPU.
        """
        return self.unit_norm.apply(q, k)

    def project(
        self,
        x: Tensor,
        conv_state: Tensor | None,
        segments: Segments | None,
        segment_ids: Tensor | None,
        slots: Slots | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute queries, keys and values of tokens.

        Args:
            x: tokens `[B, T, D]`.
            conv_state: state of the convolution, or `None`.
            segments: runs of tokens that form sequences, or `None`.
            segment_ids: sequence of each token `[B, T]`, or `None`.
            slots: slots of each row in a step, where `conv_state` is a pool.

        Returns:
            q and k `[B, T, H, K]`, v `[B, T, G, V]`, and the new state of the convolution.
        """
        mixed, sizes = self.qkv_proj(x), self.sizes
        own_norm = type(self).normalize_qk is not MemoryLayer.normalize_qk
        columns = QueryKeyColumns(sizes.keys, UnitNorm() if own_norm else self.unit_norm)
        if self.conv is None:
            q, k, v = columns.split(F.silu(mixed) if self.activate else mixed)
            q, k = columns.normalize(q, k)
            final_conv_state = mixed.new_zeros(x.shape[0] if segments is None else segments.count, 0)
            if conv_state is not None and slots is None:
                check_state_tensor("conv_state", conv_state, "N P", {"P": 0}, FLOATS, x)
        elif slots is not None and conv_state is not None:
            (q, k, v), final_conv_state = self.conv.split_step(mixed, columns, conv_state, slots), conv_state
        else:
            q, k, v, final_conv_state = self.conv.split(mixed, columns, conv_state, segments, segment_ids)
        q, k = (part.unflatten(-1, (sizes.key_heads, sizes.key_width)) for part in (q, k))
        if own_norm:
            q, k = self.normalize_qk(q, k)
        return q, k, v.unflatten(-1, (sizes.heads, sizes.value_width)), final_conv_state

    def read(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, variance: bool = False
    ) -> tuple[Filtered, tuple[Tensor | None, Tensor]]:
        """Return the read-out `[B, T, G V]`, whose columns are independent, and the gate's input; see `Mixer.read`."""
        previous = check_state(state, MemoryState, x, segments)
        belief, conv_state = (None, None) if previous is None else previous
        segment_ids = None if segments is None else segments.segment_ids(*x.shape[:2])
        x = mask_outside(x, segment_ids)
        q, k, v, conv_state = self.project(x, conv_state, segments, segment_ids)
        arguments, gate = self.signals_and_gate(x)
        if self.has_posterior:
            arguments["variance"] = variance
        with without_autocast(x.device):
            mean, var, belief = self.op(q, k, v, **arguments, belief=belief, segments=segments, kernel=self.kernel)
        mean, var = mean.flatten(2), None if var is None else var.expand_as(mean).flatten(2)
        return Filtered(mean, var, MemoryState(belief, conv_state)), (gate, mean)

    def read_step(self, x: Tensor, pool: MemoryState, slots: Slots) -> tuple[Tensor, tuple[Tensor | None, Tensor]]:
        """Return the read-out `[B, 1, G V]` of one token per row, and the gate's input; update the pool in place."""
        (q, k, v, _), arguments, gate = run_branches(
            x.device,
            partial(self.project, x, pool.conv_state, None, None, slots),
            partial(self.signals, x),
            partial(self._gate_input, x),
        )
        with without_autocast(x.device):
            mean = self.op(q, k, v, **arguments, belief=pool.belief, slots=slots, kernel=self.kernel).mean.flatten(2)
        return mean, (gate, mean)

    def signals_and_gate(self, x: Tensor) -> tuple[dict[str, Any], Tensor | None]:
        """Compute `signals` of tokens `[B, T, D]` and the gate's input, whose projections a layer may merge."""
        return self.signals(x), self._gate_input(x)

    def _gate_input(self, x: Tensor) -> Tensor | None:
        """Return the input of the output gate `[B, T, G V]`; `None` without a gate."""
        return None if self.gate_proj is None else self.gate_proj(x)

    @property
    def memory_shape(self) -> tuple[int, int]:
        """Rows and columns of the memory of one value head, as the op stores it."""
        return self.sizes.key_width, self.sizes.value_width

    def state_size(self, length: int) -> int:
        """Return the number of elements of all memories and, if the belief has them, covariances."""
        rows, columns = self.memory_shape
        covariance_size = 0 if self.design is None else self.design.covariance.elements(rows, columns)
        return self.sizes.heads * (rows * columns + covariance_size)

    def write_gain(self, x: Tensor) -> Tensor | None:
        """Return the gains `[B, T]`, averaged over heads: s' / r^2, where s' is the variance along the token's key.

        It equals 1 - s' / s since 1 / s' = 1 / s + 1 / r^2; for a regression it is the leverage of the token. `None` if
        the belief has no covariance, or tokens do not observe the memory.
        """
        if self.design is None or not self.design.has_variance or self.design.evidence.kind != "memory":
            return None
        _, k, v, _ = self.project(x, None, None, None)
        signals: dict[str, Any] = self.signals(x)
        posterior = self.op(k, k, v, **signals, variance=True).variance
        assert posterior is not None
        weight = 1 / signals["obs_noise"] if "obs_noise" in signals else signals.get("gain", torch.ones(()))
        return (weight * posterior[..., 0]).mean(-1)

    def attention_map(self, x: Tensor) -> Tensor | None:
        """Return the map of each value head: the read-outs for values that are the columns of the identity.

        `None` if each column has its own covariance or noise, since maps then differ between columns.
        """
        if self.design is not None and (self.design.evidence.kind == "cell" or self.design.evidence.columns):
            return None
        q, k, v, _ = self.project(x, None, None, None)
        identity = torch.eye(x.shape[1], dtype=v.dtype, device=v.device)[:, None].expand(*v.shape[:3], -1)
        return self.op(q, k, identity, **self.signals(x)).mean.transpose(1, 2)

    def project_out(self, readout: Tensor, context: tuple[Tensor | None, Tensor]) -> Tensor:
        """Apply output norm, gate and output projection. Each sample is normalised by its own root mean square."""
        gate = None if context[0] is None else Gate(context[0], str(self.gate))
        if self.norm is None:
            return self.out_proj(readout if gate is None else gate.multiply(readout))
        if not is_plain(self.norm, RMSNorm):
            normalized = self.norm(readout)
            return self.out_proj(normalized if gate is None else gate.multiply(normalized))
        return without_storing(partial(rms_norm, readout, self.norm.weight, self.norm.constants, gate), self.out_proj)

    def project_out_variance(self, variance: Tensor, context: tuple[Tensor | None, Tensor]) -> Tensor:
        """Propagate the variance through norm, gate and projection.

        Gate and projection are exact. The norm divides by a random root mean square; here its square is replaced by the
        expected one, mean^2 + variance averaged over the head. This is exact in the limit of wide heads.
        """
        gate, mean = context
        with without_autocast(variance.device):
            if self.norm is not None:
                column_variance = self._split(variance)
                squares = self._split(mean.to(variance.dtype)).square() + column_variance
                mean_square = squares.mean(-1, keepdim=True) + self.norm_eps
                weight = norm_weight(self.norm, self.norm_width, self.norm_eps, variance)
                variance = (column_variance / mean_square * weight.square()).flatten(-2)
            if gate is not None:
                variance = variance * ACTIVATIONS[str(self.gate)](gate).to(variance.dtype).square()
            return linear_variance(self.out_proj, variance)

    def _split(self, x: Tensor) -> Tensor:
        """Split `[..., G V]` into the groups that are normalised together."""
        return x.unflatten(-1, (-1, self.norm_width))
