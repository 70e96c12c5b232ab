"""Adaptive filter over images: a convolution whose kernel follows from dynamics, with robust weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.errors import ArgumentError
from kalmix.layers.modules import to_state_dtype
from kalmix.layers.parametrize import positive
from kalmix.ops import kappa
from kalmix.types import without_autocast
from kalmix.validation import FLOATS, check_dtype_and_device, check_positive_int, check_shape

SIDES = ("left", "right", "below", "above")  # sides of a pixel, in the order of parameters


def path_statistics(
    rate: Tensor, frequency: Tensor, process_noise: Tensor, key_noise: Tensor, query_noise: Tensor, path: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return decay, rotation and variance of complex states along paths in a plane (appendix B.6 of the paper).

    A path leads |x| along one axis and |y| along the other. Each side has a diffusion of its own. Noise of the first
    axis decays along the second; V is the mean of the two orders:

        E_x = exp(-a_x |x|),   kappa_x = (1 - E_x^2) / (2 a_x),   likewise for y;   E = E_x E_y
        V = s_x kappa_x (1 + E_y^2) / 2 + s_y kappa_y (1 + E_x^2) / 2 + key_noise E^2 + query_noise
        angle = w_x |x| + w_y |y|

    Two misprints of the paper are corrected: it multiplies the two variances, which gives straight paths none, and uses
    the noise of one side with the decay of the other. Along an axis this is `kalmix.ops.attend`.

    Args:
        rate: a >= 0, `[4, H]`, for the sides in `SIDES`: x > 0 comes from the left, y > 0 from below.
        frequency: w, `[4, H, C]`.
        process_noise: s >= 0, `[4, H]`.
        key_noise: `[H]`, >= 0; not both noises are 0.
        query_noise: `[H]`, >= 0.
        path: `[H, P, 2]`, x and y of P paths.

    Returns:
        E `[H, P]`, the angle `[H, P, C]`, and V `[H, P]`.
    """
    side = torch.where(path > 0, 0, 1) + torch.arange(0, 4, 2, device=path.device)  # [H, P, 2]
    head = torch.arange(path.shape[0], device=path.device)[:, None, None]
    distance = path.abs()
    decay = torch.exp(-rate[side, head] * distance)
    accumulated = distance * kappa(rate[side, head] * distance, torch.ones_like(distance))
    added = process_noise[side, head] * accumulated * (1 + decay.flip(-1).square()) / 2
    reach = decay.prod(-1)
    variance = added.sum(-1) + key_noise[:, None] * reach.square() + query_noise[:, None]
    return reach, (frequency[side, head] * distance[..., None]).sum(2), variance


class FilterConv2d(nn.Module):
    """Convolution over images that estimates every pixel from its neighbours with Adaptive Filter Attention.

    Paper: [Attention as an Adaptive Filter](https://arxiv.org/abs/2509.04154), appendix B.6. Misprints
    are corrected; the notes on this layer in the documentation list them.

        z = in(x);   u_pj = decay e^{i angle} z_j
        y_p = out(sum_j A_pj u_pj),   A_pj = softmax_j -log(V + |z_p - u_pj|^2)

    `in` and `out` are 1 x 1 convolutions with biases. z has H heads with C complex channels, and i is the imaginary
    unit. u_pj predicts pixel p from pixel j; j runs over the n x n square around p, p included, without pixels outside
    the image. |.|^2 sums over the channels of a head. Decay, angle and variance V are functions of the vector from j to
    p, after a linear map and a shift that each head learns (T and b in the paper); see the function `path_statistics`
    in `kalmix.layers.filter_conv2d`.

    If |z|^2 is much smaller than V, A does not depend on z. The layer is then a depthwise convolution with Gabor
    filters, the form in the paper. Otherwise pixel j gets a small weight if its prediction u_pj differs from z_p; no
    convolution can do this.

    Args:
        in_channels: channels of input images.
        out_channels: channels of output images.
        kernel_size: n, side of the square, an odd integer. Stride and dilation are 1.
        heads: H, each with its own dynamics.
        head_dim: C, complex channels per head.

    Raises:
        ArgumentError: a size is not a positive integer, or `kernel_size` is even; or, in a call, the input is not a
            tensor of that shape, or has another dtype or device than the parameters (under autocast, only float64 is
            another dtype). NaN is not checked.

    Shape:
        Input `[B, in_channels, Y, X]`, output `[B, out_channels, Y, X]`, in the dtype of the parameters. Y and X are at
        least 1. A call returns one tensor, not a pair, and there is no state.

    Complexity: O(n^2 H C) time per pixel, and as much memory in training.

    Example:
        >>> from kalmix.layers import FilterConv2d
        >>> FilterConv2d(3, 8, 5)(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, heads: int = 4, head_dim: int = 2
    ) -> None:
        super().__init__()
        sizes = {"in_channels": in_channels, "out_channels": out_channels, "heads": heads, "head_dim": head_dim}
        for name, size in (sizes | {"kernel_size": kernel_size}).items():
            check_positive_int(name, size)
        if kernel_size % 2 == 0:
            raise ArgumentError("kernel_size", got=kernel_size, expected="an odd number")
        self.in_channels = in_channels
        self.kernel_size = kernel_size
        self.heads = heads
        self.in_proj: nn.Conv2d = nn.Conv2d(in_channels, 2 * heads * head_dim, 1)
        self.log_rate: nn.Parameter = nn.Parameter(torch.empty(len(SIDES), heads))
        self.frequency: nn.Parameter = nn.Parameter(torch.empty(len(SIDES), heads, head_dim))
        self.log_process_noise: nn.Parameter = nn.Parameter(torch.empty(len(SIDES), heads))
        self.log_key_noise: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.log_query_noise: nn.Parameter = nn.Parameter(torch.empty(heads))
        self.axes: nn.Parameter = nn.Parameter(torch.empty(heads, 2, 2))
        self.shift: nn.Parameter = nn.Parameter(torch.empty(heads, 2))
        self.out_proj: nn.Conv2d = nn.Conv2d(2 * heads * head_dim, out_channels, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set rates log-uniform in [0.05, 1], noises small, and axes to those of the image."""
        nn.init.uniform_(self.log_rate, math.log(0.05), 0.0)
        nn.init.normal_(self.frequency, std=0.3)
        for noise in (self.log_process_noise, self.log_key_noise, self.log_query_noise):
            nn.init.constant_(noise, math.log(0.02))
        with torch.no_grad():
            self.axes.copy_(torch.eye(2))
        nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        """Filter images `[B, in_channels, Y, X]`; returns `[B, out_channels, Y, X]`.

        Raises:
            ArgumentError: the images have another shape, or a dtype or device other than the parameters.
        """
        check_shape("x", x, "B C Y X", {"C": self.in_channels})
        weight = self.in_proj.weight
        converts = torch.is_autocast_enabled(weight.device.type) and weight.dtype != torch.float64
        dtypes = tuple(dtype for dtype in FLOATS if dtype != torch.float64) if converts else (weight.dtype,)
        check_dtype_and_device("x", x, dtypes, weight.device)
        if x.shape[2] == 0 or x.shape[3] == 0:
            raise ArgumentError("x", problem=f"has shape {list(x.shape)}", expected="at least one row and one column")
        z = self.in_proj(x)
        with without_autocast(x.device):
            estimate = self.estimate(to_state_dtype(z))
        return self.out_proj(estimate.to(z.dtype))

    def estimate(self, z: Tensor) -> Tensor:
        """Estimate the state at every pixel from projected pixels; both `[B, 2 H C, Y, X]`, real parts first."""
        reach, angle, variance = self.path_statistics(z.dtype)
        cos, sin = ((reach[..., None] * turn).mT[..., None] for turn in (angle.cos(), angle.sin()))
        real, imaginary = self._patches(z).chunk(2, 2)  # [B, H, C, P, Y X]
        moved = torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], 2)
        center = z.flatten(2).unflatten(1, (self.heads, -1))[:, :, :, None]
        score = -torch.log(variance[..., None] + (center - moved).square().sum(2))
        inside = self._patches(torch.ones_like(z[:1, : self.heads]))[:, :, 0] > 0
        weights = score.masked_fill(~inside, -torch.inf).softmax(2)
        return (weights[:, :, None] * moved).sum(3).reshape(z.shape)

    def path_statistics(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return decay, angle and variance of the paths from the pixels of the square, row by row, to its center."""
        steps = torch.arange(self.kernel_size, device=self.axes.device, dtype=dtype) - self.kernel_size // 2
        up, right = torch.meshgrid(steps, -steps, indexing="ij")  # rows are counted downwards
        path = torch.stack([right, up], -1).flatten(0, 1) @ self.axes.to(dtype).mT + self.shift.to(dtype)[:, None]
        logs = (self.log_rate, self.log_process_noise, self.log_key_noise, self.log_query_noise)
        rate, process, key, query = (positive(x.to(dtype)) for x in logs)
        return path_statistics(rate, self.frequency.to(dtype), process, key, query, path)

    def _patches(self, x: Tensor) -> Tensor:
        """Return the square around every pixel of `[B, H C, Y, X]`, 0 outside the image: `[B, H, C, P, Y X]`."""
        patches = F.unfold(x, self.kernel_size, padding=self.kernel_size // 2)
        return patches.view(x.shape[0], self.heads, x.shape[1] // self.heads, self.kernel_size**2, patches.shape[-1])
