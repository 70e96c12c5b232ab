"""What layers around a memory share: projections, short convolution, the op's call, output norm and gate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.beliefs import detach, loadable, take, to
from kalmix.layers.base import Mixer, check_state, mask_outside
from kalmix.layers.head_sizes import Heads, divide_state
from kalmix.layers.modules import RMSNorm, ShortConvolution, l2_normalize, low_rank
from kalmix.segments import Segments
from kalmix.types import Belief, Filtered
from kalmix.validation import check_choice, check_number, check_positive_int

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@loadable
class MemoryState(NamedTuple):
    """What a memory layer remembers of each sequence: the `belief` of its op, and what its projections `carried`.

    That is the convolution's window `[N, size - 1, channels]` (of size 0 without one).
    """

    belief: Any  # a Belief; see `Filtered`
    conv_state: Tensor

    take = take
    to = to
    detach = detach


class MemoryLayer(Mixer):
    """A mixer that writes values along keys into a memory and reads it along queries:

        q, k, v = SiLU(conv(project(x)));  q, k = address(q, k)
        y = out(norm(op(q, k, v, signals(x))) * gate(x))

    A subclass says what is its paper's: `signals` and `op`, and `address` where it is not QK norm. Beliefs, decays,
    gains and noises are float32, under autocast too.

    Args:
        hidden_size: D.
        sizes: of the heads.
        conv: taps of the causal convolution over q, k and v; 0 for none.  conv_bias: whether it has a bias.
        activate: whether SiLU comes behind it.
        gate: "silu" or "sigmoid" of a projection of x, or `None`.
        gate_rank: of that projection, which then has a bias; full, without a bias, if absent.
        norm_width: columns normalised together; a head's if absent, 0 for no norm.
        norm_eps: of the output norm.
        kernel: pin a kernel of the op.
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
            check_choice("gate", gate, tuple(GATES))
        self.sizes = sizes
        self.activate = activate
        self.gate = gate
        self.kernel = kernel
        self.norm_width: int = sizes.value_width if norm_width is None else norm_width
        self.norm_eps = norm_eps
        channels = 2 * sizes.keys + sizes.values
        self.qkv_proj: nn.Linear = nn.Linear(hidden_size, channels, bias=False)
        self.conv: ShortConvolution | None = ShortConvolution(channels, conv, conv_bias) if conv else None
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
        """Return heads that together have `values * width` columns, and keys as wide as `state` numbers make of it.

        Where there is a covariance, keys are as wide as values, and a head has two such squares.
        """
        check_positive_int("heads", heads)
        if cls.design is not None and cls.design.covariance.elements(1, 1):
            return {"heads": heads, "head_dim": head_dim or isqrt(divide_state(state, 2 * heads)), "expand_v": 1.0}
        columns = divide_state(width * values, heads)
        keys = head_dim or divide_state(state, heads * columns)
        return {"heads": heads, "head_dim": keys, "expand_v": columns / keys}

    @abstractmethod
    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """What tokens `x` `[B, T, D]` supply beside q, k and v: arguments of the op."""

    @abstractmethod
    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Filter q, k `[B, T, H, K]` and v `[B, T, G, V]` with `signals`, a belief and segments."""

    def normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Where to read and write, given projected heads `[B, T, H, K]`: unit vectors, q scaled by 1 / sqrt(K)."""
        return l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k)

    def project(
        self, x: Tensor, conv_state: Tensor | None, segments: Segments | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v of tokens `x`, and what to carry on behind them."""
        mixed = self.qkv_proj(x)
        if self.conv is None:
            final_conv_state = mixed.new_zeros(x.shape[0] if segments is None else segments.count, 0)
        else:
            mixed, final_conv_state = self.conv(mixed, conv_state, segments, segment_ids)
        sizes = self.sizes
        q, k, v = (F.silu(mixed) if self.activate else mixed).split([sizes.keys, sizes.keys, sizes.values], dim=-1)
        q, k = self.normalize_qk(*(part.unflatten(-1, (sizes.key_heads, sizes.key_width)) for part in (q, k)))
        return q, k, v.unflatten(-1, (sizes.heads, sizes.value_width)), final_conv_state

    def read(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, variance: bool = False
    ) -> tuple[Filtered, tuple[Tensor | None, Tensor]]:
        """What the queries read out of the memory, `[B, T, G * V]`, independent between columns."""
        previous = check_state(state, MemoryState, x, segments)
        belief, conv_state = (None, None) if previous is None else previous
        segment_ids = None if segments is None else segments.segment_ids(*x.shape[:2])
        x = mask_outside(x, segment_ids)
        q, k, v, conv_state = self.project(x, conv_state, segments, segment_ids)
        arguments: dict[str, Any] = self.signals(x)
        if self.has_posterior:
            arguments["variance"] = variance
        with torch.autocast(x.device.type, enabled=False):
            mean, var, belief = self.op(q, k, v, **arguments, belief=belief, segments=segments, kernel=self.kernel)
        gate = None if self.gate_proj is None else GATES[str(self.gate)](self.gate_proj(x))
        mean, var = mean.flatten(2), None if var is None else var.expand_as(mean).flatten(2)
        return Filtered(mean, var, MemoryState(belief, conv_state)), (gate, mean)

    @property
    def memory_shape(self) -> tuple[int, int]:
        """Rows and columns of a value head's memory, as its op has it."""
        return self.sizes.key_width, self.sizes.value_width

    def state_size(self, length: int) -> int:
        """Return the number of elements of the memories and, where the design keeps them, of covariances."""
        rows, columns = self.memory_shape
        covariance_size = 0 if self.design is None else self.design.covariance.elements(rows, columns)
        return self.sizes.heads * (rows * columns + covariance_size)

    def write_gain(self, x: Tensor) -> Tensor | None:
        """Return the write gains `[B, T]`, averaged over heads: s' / r^2 with s' the variance at the token's key.

        For 1 / s' = 1 / s~ + 1 / r^2. Of a regression it is the token's leverage. `None` where the memory has no
        covariance, or is not what tokens observe.
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
        """Return a map for each value head: what its memory makes of values that are the columns of the identity.

        A read-out is linear in values, and the same for every column; `None` where columns have cells of their own.
        """
        if self.design is not None and self.design.evidence.kind == "cell":
            return None
        q, k, v, _ = self.project(x, None, None, None)
        identity = torch.eye(x.shape[1], dtype=v.dtype, device=v.device)[:, None].expand(*v.shape[:3], -1)
        return self.op(q, k, identity, **self.signals(x)).mean.transpose(1, 2)

    def project_out(self, readout: Tensor, context: tuple[Tensor | None, Tensor]) -> Tensor:
        """Output norm, gate, output projection. Samples are normalised each by its own size."""
        gate, _ = context
        output = readout if self.norm is None else self.norm(self._split(readout)).flatten(-2)
        return self.out_proj(output if gate is None else output * gate)

    def project_out_variance(self, variance: Tensor, context: tuple[Tensor | None, Tensor]) -> Tensor:
        """Through norm, gate and projection, each squared; columns are independent.

        The norm divides a sample by its own root mean square, which is random. Here its mean square is replaced by
        the expected one, mean^2 + variance averaged over the head: exact as heads become wide, and never more than
        the norm lets through. Gate and projection are exact.
        """
        gate, mean = context
        with torch.autocast(variance.device.type, enabled=False):
            if self.norm is not None:
                column_variance = self._split(variance)
                squares = self._split(mean.to(variance.dtype)).square() + column_variance
                mean_square = squares.mean(-1, keepdim=True) + self.norm_eps
                variance = (column_variance / mean_square * self.norm.weight.to(variance.dtype).square()).flatten(-2)
            variance = variance if gate is None else variance * gate.to(variance.dtype).square()
            return F.linear(variance, self.out_proj.weight.to(variance.dtype).square())

    def _split(self, x: Tensor) -> Tensor:
        """`[..., G * V]` into what is normalised together."""
        return x.unflatten(-1, (-1, self.norm_width))
