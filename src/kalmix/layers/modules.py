"""Modules and functions that several layers use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.layers.base import check_state_tensor, mask_outside
from kalmix.layers.fused import Norm, rms_norm
from kalmix.segments import Segments
from kalmix.types import belief_dtype
from kalmix.validation import FLOATS, check_number


def to_state_dtype(x: Tensor) -> Tensor:
    """Convert a tensor to the dtype of beliefs: float32, or float64 if it is float64."""
    return x.to(belief_dtype(x.dtype))


def apply_rotary(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Apply rotary position embeddings, computed in float32.

    Columns j and j + width / 2 rotate together, by base^(-2 j / width) radians per position.

    Args:
        x: `[B, T, heads, width]`, of even width.
        position: `[B, T]`.
        base: base of the frequencies.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (position[..., None] * frequency)[:, :, None]
    return rotate_pairs(to_state_dtype(x), angle.cos(), angle.sin()).to(x.dtype)


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


def sample_gaussian(mean: Tensor, variance: Tensor) -> Tensor:
    """Draw a reparametrised sample of independent Gaussians with PyTorch's global generator.

    Where the variance is 0, the sample is the mean.
    """
    spread = torch.where(variance > 0, variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt(), 0)
    return mean + (spread * torch.randn_like(spread)).to(mean.dtype)


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


_ONEDNN = torch.backends.mkldnn.is_available()  # read at import: torch.compile cannot trace this call


def _uses_onednn(x: Tensor) -> bool:
    return _ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time that is exact across calls and packed sequences.

    Its state is `[N, size - 1, channels]`, the last inputs of each sequence; zeros before the first.

    Args:
        channels: columns of the input.
        size: taps.
        bias: whether to add a learned bias.
    """

    def __init__(self, channels: int, size: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.channels = channels
        self.size = size
        self.weight: nn.Parameter = nn.Parameter(torch.empty(channels, size))
        self.bias: nn.Parameter | None = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Return the sizes that `repr` shows."""
        return f"channels={self.channels}, size={self.size}, bias={self.bias is not None}"

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
        sequences = x.shape[0] if segments is None else segments.count
        sizes = {"N": sequences, "P": self.size - 1, "C": self.channels}
        if state is None:
            state = x.new_zeros(*sizes.values())
        check_state_tensor("conv_state", state, "N P C", sizes, FLOATS, x)
        state = state.to(x.dtype)
        if x.shape[1] == 0:
            return x, state
        if segments is None:
            history = torch.cat([state, x], dim=1)
            final_state = history[:, x.shape[1] :].clone()  # a view would keep all inputs alive
            return self._add_bias(self._slide(history)), final_state
        segment_ids = segments.segment_ids(*x.shape[:2]) if segment_ids is None else segment_ids
        output, state = self._convolve_segments(x, state, segments, segment_ids)
        return self._add_bias(output, segment_ids), state

    def _add_bias(self, output: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        return output if self.bias is None else mask_outside(output + self.bias.to(output.dtype), segment_ids)

    def _slide(self, history: Tensor, masks: list[Tensor] | None = None) -> Tensor:
        """Convolve `[N, L + size - 1, C]` to `[N, L, C]`; `masks` selects the tokens that each tap may use.

        On a CPU, oneDNN takes a quarter of the time of the sum over taps, if channels are contiguous.
        """
        length = history.shape[1] - self.size + 1
        if masks is None and _uses_onednn(history):
            with torch.autocast("cpu", enabled=False):
                image, taps = history.mT[:, :, None], self.weight.to(history.dtype)[:, None, None]
                return F.conv2d(image, taps, groups=self.channels).squeeze(2).mT
        output = history.new_zeros(())
        for tap, weight in enumerate(self.weight.to(history.dtype).unbind(1)):
            inputs = history[:, tap : tap + length]
            output = output + (inputs if masks is None else torch.where(masks[tap], inputs, 0)) * weight
        return output

    def _convolve_segments(
        self, x: Tensor, state: Tensor, segments: Segments, segment_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch, length, _ = x.shape
        past = self.size - 1
        earlier_ids = F.pad(segment_ids, (past, 0), value=-2)
        masks = [
            ((earlier_ids[:, tap : tap + length] == segment_ids) & (segment_ids >= 0))[..., None]
            for tap in range(self.size)
        ]
        within = self._slide(F.pad(x, (0, 0, past, 0)), masks).flatten(0, 1)

        # Add the contribution of the state to the first inputs of each sequence.
        row, start, stop = segments.rows.long()[:, :, None].unbind(1)
        from_state = self._slide(F.pad(state, (0, 0, 0, past)))
        token = start + torch.arange(past, device=x.device)
        index = torch.where(token < stop, row * length + token, 0).flatten()
        from_state = torch.where((token < stop)[..., None], from_state, 0).flatten(0, 1)
        output = within.index_add(0, index, from_state).unflatten(0, (batch, length))

        # The new state: inputs of this call, preceded by the old state if there are fewer than `size - 1`.
        token = stop - past + torch.arange(past, device=x.device)
        current = x.flatten(0, 1)[row * length + token.clamp(min=0)]
        previous = (stop - start + torch.arange(past, device=x.device)).clamp(max=past - 1)
        previous = state.gather(1, previous[..., None].expand_as(state))
        return output, torch.where((token >= start)[..., None], current, previous)
