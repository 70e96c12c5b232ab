"""Modules and functions that several layers use."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kalmix.distributed.entry import entry_inputs
from kalmix.distributed.tensor_parallel import draw_noise
from kalmix.layers.base import check_state_tensor
from kalmix.layers.fused import (
    Norm,
    Packing,
    QueryKeyColumns,
    add_rms_norm,
    convolve_qkv,
    convolve_qkv_step,
    rms_norm,
    short_convolution,
    short_convolution_step,
)
from kalmix.layers.fused.rotary_angles import rotary_cos_sin
from kalmix.segments import Segments
from kalmix.steps import Slots
from kalmix.types import belief_dtype
from kalmix.validation import FLOATS, check_number


def to_state_dtype(x: Tensor) -> Tensor:
    """Convert a tensor to the dtype of beliefs: float32, or float64 if it is float64."""
    return x.to(belief_dtype(x.dtype))


def apply_rotary(q: Tensor, k: Tensor, position: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Apply rotary position embeddings to queries and keys, computed in float32 (float64 if they are).

    Columns j and j + width / 2 rotate together, by base^(-2 j / width) radians per position.

    Args:
        q: `[B, T, heads, width]`, of even width.
        k: keys of the same width and dtype; their number of heads may differ.
        position: int64 `[B, T]`, or `[1, T]` if all rows have the same positions.
        base: base of the frequencies.
    """
    cos, sin = (x[:, :, None] for x in rotary_cos_sin(position, q.shape[-1] // 2, base, belief_dtype(q.dtype)))
    return rotate_pairs(to_state_dtype(q), cos, sin).to(q.dtype), rotate_pairs(to_state_dtype(k), cos, sin).to(k.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate complex numbers given as real pairs.

    Args:
        x: `[..., 2 C]`, the C real parts, then the C imaginary parts.
        cos: `[..., C]`, cosine of the angle.
        sin: `[..., C]`, its sine.
    """
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)


def low_rank(inputs: int, rank: int, outputs: int, bias: bool) -> nn.Sequential:
    """Build a linear map of rank `rank`: two linear layers, of which the second may have a bias."""
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias))


def low_rank_pair(x: Tensor, first: nn.Module, second: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return `first(x)` and `second(x)` of two maps of `low_rank`, whose inner factors are one product.

    `x` is then read once instead of twice, and its gradient is one product, too. Return `None` if a map has parts that
    must be called, such as hooks, an adapter or quantized weights.
    """
    inner = [_inner_linear(module) for module in (first, second)]
    if inner[0] is None or inner[1] is None or inner[0].weight.dtype != inner[1].weight.dtype:
        return None
    weights = [linear.weight for linear in inner if linear is not None]
    # With two axes, the outer products read the columns of their factor in place, and add the bias.
    rows = F.linear(x.flatten(0, -2), torch.cat(weights)).split([w.shape[0] for w in weights], -1)
    outputs = [module[1](part) for module, part in zip((first, second), rows, strict=True)]  # pyright: ignore
    return outputs[0].unflatten(0, x.shape[:-1]), outputs[1].unflatten(0, x.shape[:-1])


def _inner_linear(module: nn.Module) -> nn.Linear | None:
    """Return the first factor of a map of `low_rank`; `None` if it must be called."""
    if not isinstance(module, nn.Sequential) or not is_plain(module, nn.Sequential) or len(module) != 2:
        return None
    linear = module[0]
    return linear if is_plain_linear(linear) and linear.bias is None else None


def sample_gaussian(mean: Tensor, variance: Tensor, group: Any = None) -> Tensor:
    """Draw a reparametrised sample of independent Gaussians with PyTorch's global generator.

    Where the variance is 0, the sample is the mean. `group` has the ranks that divide the last axis, if any do
    (`HeadSharding.tensor_parallel`).
    """
    spread = torch.where(variance > 0, variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt(), 0)
    return mean + (spread * draw_noise(spread, group)).to(mean.dtype)


def apply_linear(linear: nn.Module, x: Tensor) -> Tensor:
    """Apply a linear map to `x` `[..., E]` in the dtype of x, which may be wider than that of the parameters.

    A map with an adapter, hooks or quantized weights is called, in its own dtype.
    """
    if is_plain_linear(linear):
        return F.linear(x, linear.weight.to(x.dtype), None if linear.bias is None else linear.bias.to(x.dtype))
    return linear(x.to(_input_dtype(linear, x.dtype))).to(x.dtype)


def linear_variance(linear: nn.Module, variance: Tensor) -> Tensor:
    """Return the variance `[..., D]` of the output of a linear map from that of its input, `[..., E]`.

    The elements of the input must be independent. If the map has an adapter or quantized weights, its matrix is found
    by a call with E unit vectors.
    """
    if type(linear) is nn.Linear and not is_traceable_wrapper_subclass(linear.weight):  # hooks would see unit vectors
        weight = linear.weight.to(variance.dtype)
    else:
        width, dtype = variance.shape[-1], _input_dtype(linear, variance.dtype)
        outputs = linear(torch.eye(width + 1, width, dtype=dtype, device=variance.device))  # last row: the bias
        weight = (outputs[:-1] - outputs[-1]).mT.to(variance.dtype)
    return F.linear(variance, weight.square())


def norm_weight(norm: nn.Module, width: int, eps: float, like: Tensor) -> Tensor:
    """Return the weight `[width]` of an `RMSNorm`, in dtype and on the device of `like`.

    If the norm has an adapter, the weight is found by a call with ones.
    """
    if type(norm) is RMSNorm:  # a call with ones would run hooks
        return norm.weight.to(like.dtype)
    return norm(like.new_ones(1, width))[0].to(like.dtype) * (1 + eps) ** 0.5


def _input_dtype(linear: nn.Module, default: torch.dtype) -> torch.dtype:
    """Return the dtype of a linear map's weight; `default` if that is the dtype of a quantized weight."""
    dtype = getattr(getattr(linear, "weight", None), "dtype", default)
    return dtype if dtype in FLOATS else default


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_global_hooks() -> bool:
    """Return whether PyTorch runs hooks in calls of all modules, such as `register_module_forward_hook` adds."""
    return bool(nn.modules.module._has_any_global_hook())


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a call of `module` runs `kind.forward` and nothing else, such as hooks.

    Only then may a fused part use the weights of a module without calling it.
    """
    return (
        type(module) is kind
        and "forward" not in vars(module)  # accelerate's hooks replace it
        and all(len(getattr(module, name)) == 0 for name in HOOKS)
        and not has_global_hooks()
    )


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a call of `module` does no more than to multiply with its weight and to add its bias."""
    return is_plain(module, nn.Linear) and not is_traceable_wrapper_subclass(module.weight)  # sharded or quantized


class RMSNorm(nn.RMSNorm):
    """RMS norm of the last dimension, in the dtype of its input, or in autocast's; see `kalmix.layers.fused.rms_norm`.

    Args:
        width: columns.
        eps: number added to the mean square.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        check_number("norm_eps", eps, minimum=0.0)
        super().__init__(width, eps=eps)
        self.constants: Norm = Norm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Scale `[..., width]` to a root mean square of `weight`."""
        return rms_norm(x, self.weight, self.constants)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of `[..., width]` and a residual, and the norm of the sum."""
        return add_rms_norm(x, residual, self.weight, self.constants.eps)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, and an activation; exact across calls and packed sequences.

    Its state is `[N, size - 1, channels]`, the last inputs of each sequence; zeros before the first.

    Args:
        channels: columns of the input.
        size: taps.
        bias: whether to add a learned bias.
        activation: "silu", or `None` for none.
    """

    def __init__(self, channels: int, size: int = 4, bias: bool = False, activation: str | None = None) -> None:
        super().__init__()
        self.channels = channels
        self.size = size
        self.activation = activation
        self.weight: nn.Parameter = nn.Parameter(torch.empty(channels, size))
        self.bias: nn.Parameter | None = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Return the sizes that `repr` shows."""
        activation = "" if self.activation is None else f", activation={self.activation}"
        return f"channels={self.channels}, size={self.size}, bias={self.bias is not None}{activation}"

    def reset_parameters(self) -> None:
        """Draw weights uniformly within 1 / sqrt(size), as PyTorch does for convolutions; set the bias to 0."""
        nn.init.uniform_(self.weight, -(self.size**-0.5), self.size**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        segments: Segments | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve the tokens.

        Args:
            x: `[B, T, channels]`.
            state: state `[N, size - 1, channels]` to continue from; zeros by default.
            segments: runs of tokens that form sequences; by default each batch row is one sequence.
            segment_ids: `segments.segment_ids(B, T)`, if the caller has computed it.

        Returns:
            The output `[B, T, channels]` in the dtype of `x`, 0 outside segments, and the new state.

        Raises:
            ArgumentError: `state` has another shape, dtype or device.
        """
        state, packing = self._prepare(x, state, segments, segment_ids)
        return short_convolution(x, self.weight, self.bias, state, packing, self.activation)

    def split(
        self,
        x: Tensor,
        columns: QueryKeyColumns,
        state: Tensor | None = None,
        segments: Segments | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Convolve the tokens; return queries, keys and values, `[B, T, columns]` each, and the new state.

        Heads of queries and keys are normalised as `columns` says. The other arguments are those of `forward`.
        """
        state, packing = self._prepare(x, state, segments, segment_ids)
        return convolve_qkv(x, self.weight, self.bias, state, packing, self.activation, columns)

    def _prepare(
        self, x: Tensor, state: Tensor | None, segments: Segments | None, segment_ids: Tensor | None
    ) -> tuple[Tensor | None, Packing | None]:
        """Check the state; return it in the dtype of x, and the packing."""
        if state is None:
            state = entry_inputs(x, self.size - 1)
        sequences = x.shape[0] if segments is None else segments.count
        sizes = {"N": sequences, "P": self.size - 1, "C": self.channels}
        if state is not None:
            check_state_tensor("conv_state", state, "N P C", sizes, FLOATS, x)
            state = state.to(x.dtype)
        packing = None
        if segments is not None:
            packing = Packing(segments, segments.segment_ids(*x.shape[:2]) if segment_ids is None else segment_ids)
        return state, packing

    def step(self, x: Tensor, pool: Tensor, slots: Slots) -> Tensor:
        """Convolve one token for each row of a batch, in place on a pool of states.

        Args:
            x: `[B, 1, channels]`.
            pool: states of N slots, `[N, size - 1, channels]`.
            slots: slots that each row reads and writes.
        """
        return short_convolution_step(x, self.weight, self.bias, pool, slots, self.activation)

    def split_step(
        self, x: Tensor, columns: QueryKeyColumns, pool: Tensor, slots: Slots
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do a `step`; return queries, keys and values, `[B, 1, columns]` each."""
        return convolve_qkv_step(x, self.weight, self.bias, pool, slots, self.activation, columns)
