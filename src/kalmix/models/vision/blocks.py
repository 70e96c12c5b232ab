"""Parts of a vision model: convolutions over maps `[B, C, H, W]`, then mixers and attention over windows of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.errors import ArgumentError


class DropPath(nn.Module):
    """Stochastic depth: in training, a sample of the batch is 0 with probability `rate`, and scaled up otherwise."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """`[B, ...]`."""
        if not self.training or self.rate == 0:
            return x
        mask = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * (mask / (1 - self.rate))


def stem(channels: int, hidden: int, width: int) -> nn.Sequential:
    """Two convolutions that downsample the image, `[B, channels, H, W]` to `[B, width, H / 4, W / 4]`."""
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 3, 2, 1, bias=False),
        nn.BatchNorm2d(hidden, eps=1e-4),
        nn.ReLU(),
        nn.Conv2d(hidden, width, 3, 2, 1, bias=False),
        nn.BatchNorm2d(width, eps=1e-4),
        nn.ReLU(),
    )


def downsample(width: int) -> nn.Conv2d:
    """A convolution to half the map and twice the channels."""
    return nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)


class ConvBlock(nn.Module):
    """x + two convolutions of it, on maps `[B, C, H, W]`."""

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
        return x + self.drop_path(self.body(x))


class WindowAttention(nn.Module):
    """Softmax attention of every token of a window to every other, by PyTorch's SDPA; without positions.

    Called as a mixer is: the output `[B, T, D]` and a state, which is `None`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ArgumentError("heads", got=heads, expected=f"a divisor of the width {width}")
        self.heads = heads
        self.qkv_proj: nn.Linear = nn.Linear(width, 3 * width)
        self.out_proj: nn.Linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


class TokenBlock(nn.Module):
    """x + mixer(norm(x)), then the same with an MLP, on tokens `[B, T, D]`; a mixer gives its output and a state."""

    def __init__(self, width: int, mixer: nn.Module, mlp: int, drop_path: float) -> None:
        super().__init__()
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        self.mixer: nn.Module = mixer
        self.mlp_norm: nn.LayerNorm = nn.LayerNorm(width)
        self.mlp: nn.Sequential = nn.Sequential(nn.Linear(width, mlp), nn.GELU(), nn.Linear(mlp, width))
        self.drop_path: DropPath = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mixer(self.norm(x))[0])
        return x + self.drop_path(self.mlp(self.mlp_norm(x)))


class WindowBlocks(nn.Module):
    """Token blocks over the windows of a map `[B, C, H, W]`, row by row in each.

    A map that windows do not tile is padded with zeros below and to the right, as MambaVision pads: blocks see them.
    """

    def __init__(self, size: int, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.size: int = size
        self.blocks: nn.Sequential = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        size, (height, width) = self.size, x.shape[-2:]
        x = F.pad(x, (0, -width % size, 0, -height % size))
        tiles = x.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # [B, C, rows, size, columns, size]
        batch, channels, rows, _, columns, _ = tiles.shape
        tokens = self.blocks(tiles.permute(0, 2, 4, 3, 5, 1).reshape(-1, size * size, channels))
        image = tokens.view(batch, rows, columns, size, size, channels).permute(0, 5, 1, 3, 2, 4)
        return image.reshape(batch, channels, rows * size, columns * size)[..., :height, :width]
