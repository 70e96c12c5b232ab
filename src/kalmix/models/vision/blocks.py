"""Modules of a vision model: convolutions over maps `[B, C, H, W]`, and mixers or attention over windows of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.errors import ArgumentError


class DropPath(nn.Module):
    """Stochastic depth: in training, set each sample to 0 with probability `rate`, and divide the others by 1 - rate.

    Args:
        rate: probability, from 0 up to 1.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Apply to `x` `[B, ...]`; the identity in evaluation mode."""
        if not self.training or self.rate == 0:
            return x
        mask = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * (mask / (1 - self.rate))


def stem(channels: int, hidden: int, width: int) -> nn.Sequential:
    """Build the stem: two convolutions of stride 2, `[B, channels, H, W]` to `[B, width, H / 4, W / 4]`.

    Args:
        channels: channels of the image.
        hidden: channels between the convolutions.
        width: channels of the output.
    """
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 3, 2, 1, bias=False),
        nn.BatchNorm2d(hidden, eps=1e-4),
        nn.ReLU(),
        nn.Conv2d(hidden, width, 3, 2, 1, bias=False),
        nn.BatchNorm2d(width, eps=1e-4),
        nn.ReLU(),
    )


def downsample(width: int) -> nn.Conv2d:
    """Build a convolution of stride 2 that doubles the channels: `[B, C, H, W]` to `[B, 2C, H / 2, W / 2]`."""
    return nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)


class ConvBlock(nn.Module):
    """Residual block of two 3 x 3 convolutions, on maps `[B, width, H, W]`.

    Args:
        width: number of channels.
        drop_path: rate of stochastic depth.
    """

    def __init__(self, width: int, drop_path: float) -> None:
        super().__init__()
        self.body: nn.Sequential = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1),
            nn.BatchNorm2d(width),
            nn.GELU(approximate="tanh"),
            nn.Conv2d(width, width, 3, 1, 1),
            nn.BatchNorm2d(width),
        )
        self.drop_path: DropPath = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to `x` `[B, width, H, W]`."""
        return x + self.drop_path(self.body(x))


class WindowAttention(nn.Module):
    """Softmax attention without positions or mask, by PyTorch's `scaled_dot_product_attention`.

    Called like a layer of kalmix: returns the output `[B, T, D]` and a state, which is `None`.

    Args:
        width: D.
        heads: number of heads; divides `width`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ArgumentError("heads", got=heads, expected=f"a divisor of {width}, the width of this stage")
        self.heads = heads
        self.qkv_proj: nn.Linear = nn.Linear(width, 3 * width)
        self.out_proj: nn.Linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Apply attention to `x` `[B, T, D]`."""
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


class TokenBlock(nn.Module):
    """Residual block on tokens `[B, T, D]`: x + mixer(norm(x)), then x + mlp(norm(x)), with layer norms.

    Args:
        width: D.
        mixer: module that maps `[B, T, D]` to a pair of an output `[B, T, D]` and a state; the state is ignored.
        mlp: hidden width of the MLP.
        drop_path: rate of stochastic depth.
    """

    def __init__(self, width: int, mixer: nn.Module, mlp: int, drop_path: float) -> None:
        super().__init__()
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        self.mixer: nn.Module = mixer
        self.mlp_norm: nn.LayerNorm = nn.LayerNorm(width)
        self.mlp: nn.Sequential = nn.Sequential(nn.Linear(width, mlp), nn.GELU(), nn.Linear(mlp, width))
        self.drop_path: DropPath = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to `x` `[B, T, D]`.

        Raises:
            ArgumentError: the mixer does not return a tuple.
        """
        output = self.mixer(self.norm(x))
        if not isinstance(output, tuple):
            problem = f"builds a layer that returns a {type(output).__name__}"
            raise ArgumentError("mixer", problem=problem, expected="a layer that returns a tuple (output, state)")
        x = x + self.drop_path(output[0])
        return x + self.drop_path(self.mlp(self.mlp_norm(x)))


class WindowBlocks(nn.Module):
    """Token blocks applied to each window of a map `[B, C, H, W]`, its tokens in row-major order.

    If the windows do not tile the map, it is padded with zeros at the bottom and the right, as in MambaVision. The
    blocks do not mask the padding.

    Args:
        size: height and width of a window.
        blocks: modules that map `[B, size * size, C]` to the same shape.
    """

    def __init__(self, size: int, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.size: int = size
        self.blocks: nn.Sequential = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks to `x` `[B, C, H, W]`; return the same shape."""
        size, (height, width) = self.size, x.shape[-2:]
        x = F.pad(x, (0, -width % size, 0, -height % size))
        tiles = x.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # [B, C, rows, size, columns, size]
        batch, channels, rows, _, columns, _ = tiles.shape
        tokens = self.blocks(tiles.permute(0, 2, 4, 3, 5, 1).reshape(-1, size * size, channels))
        image = tokens.view(batch, rows, columns, size, size, channels).permute(0, 5, 1, 3, 2, 4)
        return image.reshape(batch, channels, rows * size, columns * size)[..., :height, :width]
